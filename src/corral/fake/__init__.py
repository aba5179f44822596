"""An OpenAI-compatible server with set pace, set faults and true latencies in its own log.

For load, faults and speed only: it computes nothing. What it shares with the real engine is the shape of its
answers, its paths, its refusals and its metrics (vLLM 0.32).
"""
