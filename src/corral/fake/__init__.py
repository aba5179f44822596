"""An OpenAI-compatible server with a set pace, faults on demand and a log of true latencies.

For load, faults and speed only: it computes nothing. What it shares with the real engine is the shape of its
answers, its paths, its refusals and its metrics (vLLM 0.32).
"""
