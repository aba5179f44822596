# llama-3.1-8b-instruct: llama-3.1-8b-instruct with vLLM docker vllm/vllm-openai:v0.32.0
# vLLM fetches meta-llama/Llama-3.1-8B-Instruct from the hub; after `corral pull meta-llama/Llama-3.1-8B-Instruct` this would serve it from disk
# rank 0, on this-machine
umask 077
mkdir -p /srv/corral-home/pasted/llama-3.1-8b-instruct/node /srv/corral-home/pasted/llama-3.1-8b-instruct/rank0
[ -s /srv/corral-home/pasted/llama-3.1-8b-instruct/key ] || openssl rand -hex -out /srv/corral-home/pasted/llama-3.1-8b-instruct/key 24
python3 -m corral.base.bundle node/guard.py /srv/corral-home/pasted/llama-3.1-8b-instruct/node/corral_guard.py
python3 -m corral.base.bundle node/row_socket.py /srv/corral-home/pasted/llama-3.1-8b-instruct/node/corral_row_socket.py
env -C /srv/corral-home/pasted/llama-3.1-8b-instruct/rank0 -u CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE -u CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS -u CUSTOM_FASTAPI_PING_HANDLER -u CUSTOM_FASTAPI_INVOCATION_HANDLER -u CUSTOM_PRE_PROCESS -u CUSTOM_POST_PROCESS -u VLLM_DEBUG_LOG_API_SERVER_RESPONSE -u VLLM_API_KEY -u VLLM_SERVER_DEV_MODE -u VLLM_USE_RUST_FRONTEND -u PYTHONHOME -u PYTHONPATH -u OPENAI_API_KEY -u PYTHONDONTWRITEBYTECODE CORRAL_DRAIN_FILE=/srv/corral-home/pasted/llama-3.1-8b-instruct/rank0/drain CORRAL_KEY_FILE=/srv/corral-home/pasted/llama-3.1-8b-instruct/key CORRAL_ROW_SOCKETS=/srv/corral-home/pasted/llama-3.1-8b-instruct/rank0 DO_NOT_TRACK=1 PYTHONPATH=/srv/corral-home/pasted/llama-3.1-8b-instruct/node PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=/srv/corral-home/cache/docker-vllm-vllm-openai-v0.32.0/inductor VLLM_CACHE_ROOT=/srv/corral-home/cache/docker-vllm-vllm-openai-v0.32.0/vllm VLLM_ENGINE_READY_TIMEOUT_S=86400 VLLM_NO_USAGE_STATS=1 sh -c 'client=$1 name=$2 owner=$3 cache=$4; shift 4
command -v "$client" >/dev/null || { echo "corral: there is no command $client on this node" >&2; exit 127; }
mkdir -p "$cache/home" || exit
ended=$("$client" ps -aq --filter "name=^$name\$" --filter "label=corral.owner=$owner" \
    --filter status=created --filter status=exited) || exit
[ -z "$ended" ] || "$client" rm $ended >/dev/null
USER=${USER:-$(id -un)} LOGNAME=${LOGNAME:-$(id -un)}; export USER LOGNAME
case $("$client" info --format "{{.SecurityOptions}}" 2>/dev/null) in
    *rootless*) set -- --user 0:0 "$@" ;;
    *) set -- --user "$(id -u):$(id -g)" "$@" ;;
esac
set -- --init "$@"
exec "$client" run "$@"
' corral-docker docker corral-llama-3.1-8b-instruct-0-c502e064 81caea3d /srv/corral-home/cache/docker-vllm-vllm-openai-v0.32.0 --rm --name corral-llama-3.1-8b-instruct-0-c502e064 --network=host --workdir /srv/corral-home/pasted/llama-3.1-8b-instruct/rank0 --label corral.launch=pastedfb5fddcdc7 --label corral.run=pastedfb5fddcdc7.0 --label corral.owner=81caea3d --log-driver=none --security-opt=label=disable --gpus all --ipc=host --env HOME=/srv/corral-home/cache/docker-vllm-vllm-openai-v0.32.0/home --env TMPDIR=/tmp --env CORRAL_DRAIN_FILE --env CORRAL_KEY_FILE --env CORRAL_LAUNCH --env CORRAL_ROW_SOCKETS --env CUDA_VISIBLE_DEVICES --env DO_NOT_TRACK --env LOGNAME --env PYTHONPATH --env PYTHONUNBUFFERED --env TORCHINDUCTOR_CACHE_DIR --env USER --env VLLM_CACHE_ROOT --env VLLM_ENGINE_READY_TIMEOUT_S --env VLLM_NO_USAGE_STATS --mount type=bind,source=/srv/corral-home/pasted/llama-3.1-8b-instruct/node,target=/srv/corral-home/pasted/llama-3.1-8b-instruct/node,ro --mount type=bind,source=/srv/corral-home/pasted/llama-3.1-8b-instruct/key,target=/srv/corral-home/pasted/llama-3.1-8b-instruct/key,ro --mount type=bind,source=/srv/corral-home/pasted/llama-3.1-8b-instruct/rank0,target=/srv/corral-home/pasted/llama-3.1-8b-instruct/rank0 --mount type=bind,source=/srv/corral-home/cache/docker-vllm-vllm-openai-v0.32.0,target=/srv/corral-home/cache/docker-vllm-vllm-openai-v0.32.0 --entrypoint vllm vllm/vllm-openai:v0.32.0 serve meta-llama/Llama-3.1-8B-Instruct --served-model-name=llama-3.1-8b-instruct --tensor-parallel-size 1 --max-model-len 131072 --dtype bfloat16 --gpu-memory-utilization 0.92 --max-num-batched-tokens 8192 --max-num-seqs 1024 --api-server-count 4 --max-cudagraph-capture-size 1024 --host 127.0.0.1 --port 8000 --middleware corral_guard.Guard --disable-uvicorn-access-log --enable-prompt-tokens-details --enable-request-id-headers --enable-tokenizer-info-endpoint --allowed-origins '[]' --enable-auto-tool-choice --tool-call-parser llama3_json
