"""What an engine's log can say -> cause -> what to do: one table for failures, one for slow starts.

Rows are tried in order; the first that matches wins, so specific rows stand before general ones. Each row has a test
with a recorded log, or with lines as vLLM writes them. `{1}` in a text is the pattern's first group.
"""

from __future__ import annotations

from dataclasses import dataclass

from corral.deploy.deployment.state import Reason

LET_THE_PLAN_CHOOSE = (
    "Let the plan choose the number format (give neither a dtype nor --set weights), or fix one that is fast on"
    " this CPU: --set weights=fp32."
)


@dataclass(frozen=True)
class Signature:
    """One thing a log can say."""

    reason: Reason
    pattern: str
    cause: str
    remedy: str


# messages of a runtime before there is any engine; they come first, because they end a log
RUNTIME_SIGNATURES: tuple[Signature, ...] = (
    Signature(
        Reason.NO_RUNTIME,
        r"corral: (?:there is no command (\S+)|(\S+) does not work) on this node",
        "the command {1}{2} is not on the node, or does not work there",
        "Install it there, or choose another runtime: [runtime] in a profile, or --runtime of `corral up`.",
    ),
    Signature(
        Reason.NO_RUNTIME,
        r"corral: the conda environment (.+?) could not be activated",
        "the conda environment {1} could not be activated",
        "`conda env list` on the node shows its environments; name one: env in [runtime] of a profile, or "
        "--runtime-option env=… of `corral up`.",
    ),
    Signature(
        Reason.NO_RUNTIME,
        r"corral: the module (\S+) could not be loaded",
        "the module {1} could not be loaded",
        "`module avail` (with Lmod `module spider {1}`) on the node lists what there is.",
    ),
    Signature(
        Reason.NO_RUNTIME,
        r"permission denied while trying to connect to the [Dd]ocker|dial unix \S+: connect: permission denied",
        "this user may not use the Docker daemon of the node",
        "Ask to be added to the group `docker` (then log in again), or use podman or apptainer: [runtime] in a "
        "profile, or --runtime of `corral up`.",
    ),
    Signature(
        Reason.NO_RUNTIME,
        r"Cannot connect to the Docker daemon(?: at (\S+?)\. )?|Cannot connect to Podman",
        "the container daemon of the node does not answer {1}",
        "Start it (`systemctl start docker`), and check DOCKER_HOST and `docker context ls`.",
    ),
    Signature(
        Reason.NO_GPU,
        r"could not select device driver|unresolvable CDI devices ([^\n]+)|nvidia-container-cli: ([^\n]+)"
        r"|unknown or invalid runtime name: nvidia",
        "containers cannot use this node's GPUs {1}{2}",
        "Install the NVIDIA Container Toolkit there (for Podman also `nvidia-ctk cdi generate`), and check that"
        " `nvidia-smi` works outside a container.",
    ),
    Signature(
        Reason.NAME_TAKEN,
        r"container name \"/?([^\"]+)\" is already in use",
        "a container named {1} already exists, and this launch did not create it",
        "See whose it is (`docker ps -a --filter name={1}`); remove it if nobody needs it, or choose another name.",
    ),
    Signature(
        Reason.NO_IMAGE,
        r"pull access denied for ([^\s,]+)|manifest for (\S+) not found|(\S+): (?:image not known|manifest unknown)"
        r"|requested access to the resource is denied|unauthorized: authentication required|No such image: (\S+)",
        "there is no image {1}{2}{3}{4}, or this user may not pull it",
        "Check its name and tag; for a private one log in on the node first (`docker login`).",
    ),
    Signature(
        Reason.NO_IMAGE,
        r"Unable to find image '([^']+)' locally\n(?:docker: |[^\n]*Error response)"
        r"|docker: Error response from daemon: (?:Get|Head|toomanyrequests|net/http|failed to register layer)",
        "the image {1} is not on the node and could not be pulled",
        "Pull it where there is a network (`docker pull`), or bring it there with `docker save` and `docker load`.",
    ),
    Signature(
        Reason.NO_IMAGE,
        r"could not open image (\S+?):|initializing source (\S+?):|[Ff]ailed to (?:pull|build) (?:image )?(\S+?):",
        "the image {1}{2}{3} is not there and could not be pulled",
        "Check its path or name; pull it where there is a network and copy it to the node.",
    ),
    Signature(
        Reason.ENGINE_BROKEN,
        r"(?:exec:|FATAL:) +\"([^\"]+)\": executable file not found"
        r"|executable file [`']?(\S+?)[`']? not found in \$PATH|exec (\S+) failed: No such file or directory"
        r"|failed to exec pid1: No such file",
        "the image has no command {1}{2}{3} to start the engine with",
        "Use an image with vLLM in it, such as vllm/vllm-openai.",
    ),
    Signature(
        Reason.BAD_ARGUMENT,
        r"bind source path does not exist: ([^\n]+)|statfs ([^\n]+): no such file or directory"
        r"|mount source (\S+) doesn't exist",
        "a folder to be mounted is not on the node: {1}{2}{3}",
        "Make the folder there, or correct mounts: in [runtime] of a profile, or --runtime-option of `corral up`.",
    ),
    Signature(
        Reason.BAD_ARGUMENT,
        r"unknown (?:shorthand )?flag: (\S+)",
        "the container's client refused an argument: {1}",
        "Correct --runtime-option args=…; `corral up --dry-run` shows the whole command.",
    ),
)

SIGNATURES: tuple[Signature, ...] = (
    *RUNTIME_SIGNATURES,
    Signature(
        Reason.PORT_TAKEN,
        r"(?:Errno 98\]|address already in use|Address already in use)",
        "the port was taken by another process before the server could bind it",
        "Start it again: another free port is chosen; or name one with --port of `corral up`.",
    ),
    Signature(
        Reason.CONTEXT_TOO_LONG,
        r"max seq len \(?(\d+)\)?, \(?([\d.]+) GiB KV cache is needed.*?available KV cache memory \(([\d.]+) GiB\)"
        r"(?:\. .*?estimated maximum model length is (\d+))?",
        "one request of {1} tokens needs {2} GiB of KV cache, and only {3} GiB are free after the weights",
        "Ask for a shorter context (--context {4}), a smaller model, or more memory per GPU.",
    ),
    Signature(
        Reason.CONTEXT_TOO_LONG,
        r"max_model_len \((\d+)\) is greater than the derived max_model_len \((?:.*?=)?(\d+)",
        "the requested context of {1} tokens is longer than the {2} this model was trained for",
        "Ask for at most --context {2}.",
    ),
    Signature(
        Reason.OUT_OF_MEMORY,
        r"No available memory for the cache blocks",
        "the weights leave no memory for the KV cache",
        "Use more GPUs, a quantised form of the model, or a larger --set gpu_memory_utilization=….",
    ),
    Signature(
        Reason.OUT_OF_MEMORY,
        r"Free memory on device (\S+) \(([\d.]+)/([\d.]+) GiB\) on startup is less than",
        "{1} has only {2} of {3} GiB free: another process holds the rest",
        "See who with `nvidia-smi`, stop it if it is yours, or lower --set gpu_memory_utilization=….",
    ),
    Signature(
        Reason.OUT_OF_MEMORY,
        r"(?:CUDA out of memory|OutOfMemoryError|HIP out of memory).*?Tried to allocate ([\d.]+ \w+)",
        "a GPU ran out of memory while allocating {1}",
        "Lower --set max_num_batched_tokens=… or max_num_seqs=…, shorten --context, or use more GPUs.",
    ),
    Signature(
        Reason.OUT_OF_HOST_MEMORY,
        r"Available memory on node \S+ \(([\d.]+)/([\d.]+) GiB\).*?is less than (?:desired|requested)",
        "this machine has {1} of {2} GiB of memory free, less than the engine was told to use",
        "Close other programs, or ask for a shorter --context.",
    ),
    Signature(
        Reason.OUT_OF_HOST_MEMORY,
        r"(?:DefaultCPUAllocator: can't allocate memory|Cannot allocate memory|MemoryError)",
        "the machine ran out of memory",
        "Close other programs, ask for a shorter --context, or choose a smaller model.",
    ),
    Signature(
        Reason.BAD_PARALLELISM,
        r"[Tt]otal number of attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)",
        "the model's {1} attention heads cannot be split over {2} GPUs",
        "Choose a tensor-parallel size that divides {1}.",
    ),
    Signature(
        Reason.BAD_PARALLELISM,
        r"World size \((\d+)\) is larger than the number of available (?:GPUs|devices|.*?) \((\d+)\)",
        "the plan needs {1} GPUs on this node and there are {2}",
        "Use fewer GPUs, or name more nodes.",
    ),
    Signature(
        Reason.GATED_MODEL,
        r"(?:GatedRepoError|Cannot access gated repo|Access to model (\S+) is restricted)",
        "the model's repository is gated and this token may not read it",
        "Request access on the model's page, then put a token of that account into HF_TOKEN.",
    ),
    Signature(
        Reason.NO_SPACE,
        r"(?:No space left on device|Errno 28\])",
        "a disk is full",
        "Free space where the model, the engine's cache (CORRAL_HOME) and /dev/shm live.",
    ),
    Signature(
        Reason.MODEL_INCOMPLETE,
        r"(?:SafetensorError|Error while deserializing header|InvalidHeader|incomplete metadata"
        r"|MetadataIncompleteBuffer)",
        "a weight file is damaged or was not downloaded completely",
        "Download the model again: finished files are kept, the broken one is replaced.",
    ),
    Signature(
        Reason.MODEL_INCOMPLETE,
        r"(?:Cannot find any model weights with|No such file or directory: '?([^'\n]*\.safetensors)'?)",
        "weight files of the model are missing {1}",
        "Download the model again: finished files are kept.",
    ),
    Signature(
        Reason.MODEL_INCOMPLETE,
        r"(?:Following weights were not initialized from checkpoint|weights of the model .* not initialized)",
        "the weight files do not hold all of the model's weights",
        "Download the model again, or check that config.json belongs to these weights.",
    ),
    Signature(
        Reason.MODEL_UNSUPPORTED,
        r"Model architectures? (\[[^\]]*\]|'\S+') are not supported",
        "this vLLM does not know the architecture {1}",
        "Try a newer engine version, or another model.",
    ),
    Signature(
        Reason.MODEL_UNSUPPORTED,
        r"(?:does not recognize this architecture|[Uu]nrecognized configuration class)",
        "the engine's transformers does not know this model's type",
        "Try a newer engine version, or another model.",
    ),
    Signature(
        Reason.MODEL_UNSUPPORTED,
        r"Unsupported CPU attention configuration: head_dim=(\d+)",
        "the CPU engine has no attention kernel for heads of size {1}",
        "Serve this model on a GPU, or choose another.",
    ),
    Signature(
        Reason.BAD_ARGUMENT,
        r"(?:unrecognized arguments: (.+)|error: argument (.+)|error: ambiguous option: (.+))",
        "the engine refused an argument: {1}{2}{3}",
        "Correct the arguments after `--`; `corral up --dry-run` shows the whole command.",
    ),
    Signature(
        Reason.NETWORK,
        r"(?:ncclSystemError|ncclRemoteError|ncclInternalError|NCCL error|Gloo connectFullMesh failed|"
        r"Connection closed by peer)",
        "the ranks could not talk to each other",
        "Name the interface that joins the nodes: --interface NAME.",
    ),
    Signature(
        Reason.NO_GPU,
        r"(?:NVIDIA driver on your system is too old[^\n]*|CUDA driver version is insufficient)",
        "the GPU driver is too old for this engine's CUDA",
        "Update the driver, or install an engine built for an older CUDA.",
    ),
    Signature(
        Reason.NO_GPU,
        r"(?:No CUDA GPUs are available|Failed to infer device type|no NVIDIA driver|Found no NVIDIA driver)",
        "the engine sees no GPU",
        "Check `nvidia-smi` and CUDA_VISIBLE_DEVICES; on a machine without a GPU use --flavour cpu of `corral up`.",
    ),
    Signature(
        Reason.ENGINE_BROKEN,
        r"(?:undefined symbol[^\n]*|ImportError: [^\n]*\.so[^\n]*|operator torchvision::nms does not exist"
        r"|compiled for torch[^\n]*)",
        "the engine's environment is broken: its PyTorch does not match its other packages",
        "Reinstall it: corral engine remove cpu && corral engine install cpu (or cuda).",
    ),
    Signature(
        Reason.ENGINE_BROKEN,
        r"ModuleNotFoundError: No module named '([^']+)'",
        "the engine's environment lacks the module {1}",
        "Run `corral engine check`; reinstall the engine if it fails.",
    ),
    Signature(
        Reason.BAD_ARGUMENT,
        r"(?:Value error, ([^\n]+)|ValueError: ([^\n]+))",
        "the engine refused its configuration: {1}{2}",
        "Correct the arguments after `--`; `corral up --dry-run` shows the whole command.",
    ),
    Signature(  # a warning at first: the engine goes on, and later ends without a message (seen on Neoverse-N1)
        Reason.BAD_ARGUMENT,
        r"Failed to create oneDNN linear, fallback to torch linear",
        "the engine ended without a message, after its libraries had refused the chosen number format (bf16 or fp16):"
        " this CPU has no arithmetic for it",
        LET_THE_PLAN_CHOOSE,
    ),
)

# why a start takes long, before anything has failed
SLOW: tuple[Signature, ...] = (
    Signature(
        Reason.NOT_ADVANCING,
        r"mkldnn_\w*(?:matmul|linear|gemm)\w*[^\n]*(?:needs? the cpu support|not supported|refused)"
        r"|Failed to create oneDNN linear, fallback to torch linear",
        "this CPU has no fast arithmetic for the chosen number format (bf16 or fp16), so the engine multiplies in a"
        " reference loop, many times slower",
        LET_THE_PLAN_CHOOSE,
    ),
    Signature(
        Reason.NOT_ADVANCING,
        r"[Pp]lacement group|No available node types can fulfill|VLLM_HOST_IP",
        "Ray cannot place the ranks: a node did not join, or reports another address than the one Ray knows",
        "Compare the nodes' addresses (`corral doctor`), and see the other ranks' logs: corral logs {name} --rank N.",
    ),
    Signature(
        Reason.NOT_ADVANCING,
        r"client socket has (?:timed out|failed to connect)|connectFullMesh|failed to connect to \S+"
        r"|\[c10d\][^\n]*retry",
        "a rank cannot reach the others over the network",
        "`corral doctor` shows the interfaces that all nodes share; name one with --interface.",
    ),
    Signature(
        Reason.NOT_ADVANCING,
        r"No available shared memory broadcast block|Waiting for \d+ (?:local|remote)|still waiting"
        r"|waiting for .*engine",
        "a rank waits for another one that does not answer",
        "See what the other ranks say: corral logs {name} --rank N.",
    ),
    Signature(
        Reason.NOT_ADVANCING,
        r"Filesystem type for checkpoints: (NFS\d*|LUSTRE|FUSE\w*|CIFS|SMB\w*|9P)",
        "the weights are read over a network file system ({1}), piece by piece",
        "Bring them to the nodes' own disks first (`corral pull`), or read them ahead with vLLM's"
        " -- --safetensors-load-strategy prefetch.",
    ),
    Signature(
        Reason.NOT_ADVANCING,
        r"flashinfer[^\n]*(?:JIT|ninja|compil)|(?:nvcc|ninja) ",
        "kernels are being built on this machine for the first time",
        "Wait: the next start finds them.",
    ),
)
