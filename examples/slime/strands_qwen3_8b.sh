#!/bin/bash
# GRPO with Qwen3-8B and a Python tool on one node with 8 GPUs. Run it in slime's container; see README.md.
set -euo pipefail

SLIME_DIR=${SLIME_DIR:-~/slime}
MEGATRON_DIR=${MEGATRON_DIR:-~/Megatron-LM}
MODEL_DIR=${MODEL_DIR:-~/models/Qwen}
DATA_DIR=${DATA_DIR:-~/data}
NUM_GPUS=${NUM_GPUS:-8}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
EXAMPLE_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

export PYTHONUNBUFFERED=1

for needed in "${SLIME_DIR}/train.py" "${MODEL_DIR}/Qwen3-8B" "${MODEL_DIR}/Qwen3-8B_torch_dist" \
    "${DATA_DIR}/dapo-math-17k.jsonl" "${DATA_DIR}/aime-2024.jsonl"; do
    [[ -e "${needed}" ]] || { echo "${needed} is not there: see README.md" >&2; exit 1; }
done

# MODEL_ARGS
source "${SLIME_DIR}/scripts/models/qwen3-8B.sh"

CKPT_ARGS=(
    --hf-checkpoint "${MODEL_DIR}/Qwen3-8B"
    --ref-load "${MODEL_DIR}/Qwen3-8B_torch_dist"
    --save "${MODEL_DIR}/Qwen3-8B_strands_$(date +%Y%m%d_%H%M%S)"
    --save-interval 20
    --rotary-base 1000000
)

# No --apply-chat-template: the agent puts the template around the prompt.
ROLLOUT_ARGS=(
    --prompt-data "${DATA_DIR}/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --rollout-shuffle
    --num-rollout 3000
    --rollout-batch-size 16
    --n-samples-per-prompt 8
    --rollout-max-response-len 16384
    --rollout-temperature 1
    --global-batch-size 128
    --balance-data
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "${DATA_DIR}/aime-2024.jsonl"
    --n-samples-per-eval-prompt 8
    --eval-max-response-len 16384
    --eval-top-p 1
)

# A sample has to fit max-tokens-per-gpu (times context-parallel-size), its prompt included.
PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 1
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 18432
)

# Removed samples must not move a group's baseline, which slime's own normalization lets them.
GRPO_ARGS=(
    --advantage-estimator grpo
    --custom-reward-post-process-path strands_sglang.trainers.slime.grpo_rewards_by_group
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)

WANDB_ARGS=()
if [[ -n "${WANDB_KEY:-}" ]]; then
    WANDB_ARGS=(--use-wandb --wandb-project strands-slime --wandb-group qwen3-8b-dapo --wandb-key "${WANDB_KEY}")
fi

# The agents of one prompt share its prefix, and the turns of an agent its whole history: keep them on one worker.
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.5
    --router-policy consistent_hashing
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

CUSTOM_ARGS=(
    --custom-generate-function-path generate_with_strands.generate
    --custom-rm-path generate_with_strands.reward_func
)

ray start --head --node-ip-address "${MASTER_ADDR}" --num-gpus "${NUM_GPUS}" --disable-usage-stats

RUNTIME_ENV=$(
    printf '{"env_vars": {"PYTHONPATH": "%s:%s:%s", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}' \
        "${MEGATRON_DIR}" "${EXAMPLE_DIR}" "${SLIME_DIR}"
)

cd "${SLIME_DIR}"
ray job submit --address "http://127.0.0.1:8265" --runtime-env-json "${RUNTIME_ENV}" -- \
    python3 train.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node "${NUM_GPUS}" \
    --colocate \
    "${MODEL_ARGS[@]}" \
    "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    ${WANDB_ARGS[@]+"${WANDB_ARGS[@]}"} \
    "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "${CUSTOM_ARGS[@]}"
