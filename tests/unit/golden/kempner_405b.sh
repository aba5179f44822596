#!/bin/bash -l
#SBATCH --job-name=corral-llama-3.1-405b
#SBATCH --partition=kempner_h100
#SBATCH --account=kempner_lab
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=96
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=4:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output=/n/holylabs/corral/deployments/llama-3.1-405b/job.log
# llama-3.1-405b with vLLM cuda-0.32.0 on 4 nodes × 4 × H100-SXM, for the deployment llama-3.1-405b; one agent of Corral's per node
umask 077
folder=/n/holylabs/corral/deployments/llama-3.1-405b
[ -f "$folder/node/slurm_start.py" ] || exit 66  # not on a file system that this node shares
# 120 s before the end: no new requests; running ones have 90 s
trap 'echo 90 >"$folder/rank0/drain"' USR1
module load python/3.12.5-fasrc01
srun --ntasks-per-node=1 --kill-on-bad-exit=1 --label --cpus-per-task=96 python3 -I "$folder/node/slurm_start.py" "$folder" &
agents=$!
while true; do  # the signal ends a wait, not the agents
    wait "$agents"
    code=$?
    kill -0 "$agents" 2>/dev/null || exit "$code"
done
