# llama-3.1-70b-instruct: llama-3.1-70b-instruct with vLLM conda vllm-inference (modules python)
# tool calls are read by vLLM's parser llama3_json; --no-tools switches them off
python3 -P -m corral pull meta-llama/Llama-3.1-70B-Instruct --to /srv/corral-home/models/llama-3.1-70b-instruct
umask 077
mkdir -p /srv/corral-home/pasted/llama-3.1-70b-instruct/node /srv/corral-home/pasted/llama-3.1-70b-instruct/rank0
[ -s /srv/corral-home/pasted/llama-3.1-70b-instruct/key ] || openssl rand -hex -out /srv/corral-home/pasted/llama-3.1-70b-instruct/key 24
python3 -P -m corral.base.bundle node/agent /srv/corral-home/pasted/llama-3.1-70b-instruct/node/agent.py
python3 -P -m corral.base.bundle node/guard.py /srv/corral-home/pasted/llama-3.1-70b-instruct/node/corral_guard.py
python3 -P -m corral.base.bundle node/row_socket.py /srv/corral-home/pasted/llama-3.1-70b-instruct/node/corral_row_socket.py
python3 -P -m corral.base.bundle engines/engine_side/quick_start.py /srv/corral-home/pasted/llama-3.1-70b-instruct/node/corral_quick_start.py
python3 -P -m corral.base.bundle node/ray_rank.py /srv/corral-home/pasted/llama-3.1-70b-instruct/node/ray_rank.py
python3 -P -m corral.base.bundle node/slurm_start.py /srv/corral-home/pasted/llama-3.1-70b-instruct/node/slurm_start.py
# rank 0 runs this; what is in @…@ is found on the nodes:
#   corral-conda '' vllm-inference python -m corral_quick_start python -m vllm.entrypoints.cli.main serve /srv/corral-home/models/llama-3.1-70b-instruct --served-model-name=llama-3.1-70b-instruct --tensor-parallel-size 4 --max-model-len 131072 --dtype bfloat16 --gpu-memory-utilization 0.92 --max-num-batched-tokens 8192 --max-num-seqs 1024 --api-server-count 2 --host 0.0.0.0 --port @PORT@ --middleware corral_guard.Guard --disable-uvicorn-access-log --enable-prompt-tokens-details --enable-request-id-headers --enable-tokenizer-info-endpoint --allowed-origins '[]' --enable-auto-tool-choice --tool-call-parser llama3_json
cat >/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0/template.json <<'CORRAL'
{"launch_id": "pasted288275c91b", "deployment": "llama-3.1-70b-instruct", "rank": 0, "argv": ["bash", "-c", "purge=$1; shift\nif ! type module >/dev/null 2>&1; then\n    for init in \"$LMOD_PKG/init/bash\" \"$MODULESHOME/init/bash\" /etc/profile.d/lmod.sh /etc/profile.d/modules.sh \\\n        /usr/share/lmod/lmod/init/bash /usr/share/modules/init/bash /etc/profile.d/z00_lmod.sh; do\n        if [ -r \"$init\" ]; then . \"$init\"; break; fi\n    done\nfi\ntype module >/dev/null 2>&1 || { echo \"corral: there is no command module on this node\" >&2; exit 127; }\npython_path=$PYTHONPATH\n[ \"$purge\" = no ] || module purge\nwhile [ \"$1\" != -- ]; do\n    before=$LOADEDMODULES\n    module load \"$1\" || { echo \"corral: the module $1 could not be loaded\" >&2; exit 1; }\n    case \":$LOADEDMODULES\" in\n        *\":$1\"*) ;;\n        \":$before\") echo \"corral: the module $1 could not be loaded\" >&2; exit 1 ;;\n    esac\n    shift\ndone\nshift\nunset PYTHONHOME PYTHONPATH\n[ -z \"$python_path\" ] || export PYTHONPATH=\"$python_path\"\nexec \"$@\"\n", "corral-module", "no", "python", "--", "bash", "-c", "conda=$1 wanted=$2; shift 2\nif [ -z \"$conda\" ]; then\n    for found in \"$CONDA_EXE\" \"$(type -P conda)\" \"$HOME\"/{miniforge3,mambaforge,miniconda3,anaconda3}/bin/conda \\\n        /opt/{conda,miniforge3,mambaforge,miniconda3,anaconda3}/bin/conda; do\n        if [ -x \"$found\" ]; then conda=$found; break; fi\n    done\nfi\nif [ -n \"$conda\" ]; then\n    hook=$(\"$conda\" shell.bash hook) || { echo \"corral: $conda does not work on this node\" >&2; exit 1; }\n    eval \"$hook\"\n    conda activate \"$wanted\" || { echo \"corral: the conda environment $wanted could not be activated\" >&2; exit 1; }\nelif [ -x \"$wanted/bin/python\" ]; then\n    export PATH=\"$wanted/bin:$PATH\" CONDA_PREFIX=\"$wanted\"\nelse\n    echo \"corral: there is no command conda on this node\" >&2; exit 127\nfi\nunset PYTHONHOME\nexec \"$@\"\n", "corral-conda", "", "vllm-inference", "python", "-m", "corral_quick_start", "python", "-m", "vllm.entrypoints.cli.main", "serve", "/srv/corral-home/models/llama-3.1-70b-instruct", "--served-model-name=llama-3.1-70b-instruct", "--tensor-parallel-size", "4", "--max-model-len", "131072", "--dtype", "bfloat16", "--gpu-memory-utilization", "0.92", "--max-num-batched-tokens", "8192", "--max-num-seqs", "1024", "--api-server-count", "2", "--host", "0.0.0.0", "--port", "@PORT@", "--middleware", "corral_guard.Guard", "--disable-uvicorn-access-log", "--enable-prompt-tokens-details", "--enable-request-id-headers", "--enable-tokenizer-info-endpoint", "--allowed-origins", "[]", "--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"], "env": {"VLLM_CACHE_ROOT": "/srv/corral-home/cache/conda/vllm", "TORCHINDUCTOR_CACHE_DIR": "/srv/corral-home/cache/conda/inductor", "TRITON_CACHE_DIR": "/srv/corral-home/cache/conda/triton", "CORRAL_KEY_FILE": "/srv/corral-home/pasted/llama-3.1-70b-instruct/key", "CORRAL_DRAIN_FILE": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0/drain", "CORRAL_ROW_SOCKETS": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0", "PYTHONPATH": "/srv/corral-home/pasted/llama-3.1-70b-instruct/node", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_ENGINE_READY_TIMEOUT_S": "86400"}, "unset_env": ["HUGGING_FACE_HUB_TOKEN", "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE", "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS", "CUSTOM_FASTAPI_PING_HANDLER", "CUSTOM_FASTAPI_INVOCATION_HANDLER", "CUSTOM_PRE_PROCESS", "CUSTOM_POST_PROCESS", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_LORA_RESOLVER_HF_REPO_LIST", "VLLM_USE_RUST_FRONTEND", "PYTHONHOME", "PYTHONPATH", "OPENAI_API_KEY", "HF_TOKEN", "PYTHONDONTWRITEBYTECODE"], "cwd": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0", "serve": {"host": "0.0.0.0", "port": 0, "model": "llama-3.1-70b-instruct", "key_file": "/srv/corral-home/pasted/llama-3.1-70b-instruct/key", "task": "generate"}, "events": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0/events.jsonl", "log": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0/engine.log", "load": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0/load.jsonl", "heartbeat": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0/heartbeat.json", "agent_file": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0/agent.json", "engine_file": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0/engine.json", "stop_file": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0/stop", "drain_file": "/srv/corral-home/pasted/llama-3.1-70b-instruct/rank0/drain", "patience": {"stall_s": null, "idle_s": 600.0, "hung_s": 300.0, "node_s": 10.0, "grace_s": 20.0, "restarts": 0}, "expected": {"usual_s": {"installing engine": 300.0, "measuring CPU": 5.0, "fetching model": 1431.1, "starting": 30.0, "initialising": 30.0, "compiling": 60.0, "warming": 45.0, "loading": 75.6}, "limit_s": {"installing engine": 3000.0, "measuring CPU": 900.0, "fetching model": 14311.0, "starting": 900.0, "initialising": 900.0, "compiling": 900.0, "warming": 900.0, "loading": 900.0}, "default_limit_s": 900.0, "weights_bytes": 141107412992}, "cleanup": [], "pid_query": [], "gang": null, "interface": ""}
CORRAL
cat >/srv/corral-home/pasted/llama-3.1-70b-instruct/job.sh <<'CORRAL'
#!/bin/bash
#SBATCH --job-name=corral-llama-3.1-70b-instruct
#SBATCH --partition=gpu_h100
#SBATCH --account=my_lab
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=4:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output=/srv/corral-home/pasted/llama-3.1-70b-instruct/job.log
# llama-3.1-70b-instruct with vLLM conda vllm-inference (modules python) on 4 × H100-SXM, for the deployment llama-3.1-70b-instruct; one agent of Corral's per node
umask 077
folder=/srv/corral-home/pasted/llama-3.1-70b-instruct
[ -f "$folder/node/slurm_start.py" ] || exit 66  # not on a file system that this node shares
# 120 s before the end: no new requests; running ones have 90 s
trap 'echo 90 >"$folder/rank0/drain"' USR1
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --label --cpus-per-task=96 python3 -I "$folder/node/slurm_start.py" "$folder" &
agents=$!
while true; do  # the signal ends a wait, not the agents
    wait "$agents"
    code=$?
    kill -0 "$agents" 2>/dev/null || exit "$code"
done
CORRAL
sbatch /srv/corral-home/pasted/llama-3.1-70b-instruct/job.sh
# when it is ready: /srv/corral-home/pasted/llama-3.1-70b-instruct/endpoint.json has the address, and names the key's file
