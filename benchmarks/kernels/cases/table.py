"""The cases of `run.py`: the ops at the shapes of the published models.

To add an op, write a generator of `Case` and put it into `OPS`.
"""

from benchmarks.kernels.cases.attention import (
    attention_inputs_cases,
    paged_attention_cases,
    prefill_attention_cases,
    slot_mapping_cases,
    window_attention_cases,
    window_prefill_cases,
)
from benchmarks.kernels.cases.conv import (
    conv_update_cases,
    gdn_inputs_by_channel_cases,
    gdn_inputs_cases,
    mamba2_inputs_cases,
)
from benchmarks.kernels.cases.latent import (
    latent_attention_cases,
    latent_prefill_attention_cases,
)
from benchmarks.kernels.cases.matmul import (
    argmax_matmul_cases,
    gated_matmul_cases,
    gated_norm_matmul_cases,
    grouped_matmul_cases,
    matmul_silu_cases,
    matmul_squared_relu_cases,
    norm_matmul_cases,
    split_matmul_cases,
)
from benchmarks.kernels.cases.moe import latent_moe_feed_forward_cases, moe_feed_forward_cases
from benchmarks.kernels.cases.norm import add_norm_cases, gated_group_norm_cases
from benchmarks.kernels.cases.prefill import gdn_prefill_cases, mamba2_prefill_cases
from benchmarks.kernels.cases.replay import (
    gdn_conv_replay_cases,
    gdn_replay_cases,
    mamba2_conv_replay_cases,
    mamba2_replay_cases,
)
from benchmarks.kernels.cases.step import gdn_step_cases, mamba2_step_cases, state_select_cases

OPS = {
    "gdn_step": gdn_step_cases,
    "gdn_prefill": gdn_prefill_cases,
    "gdn_replay": gdn_replay_cases,
    "gdn_conv_replay": gdn_conv_replay_cases,
    "mamba2_step": mamba2_step_cases,
    "mamba2_replay": mamba2_replay_cases,
    "mamba2_inputs": mamba2_inputs_cases,
    "mamba2_conv_replay": mamba2_conv_replay_cases,
    "mamba2_prefill": mamba2_prefill_cases,
    "conv_update": conv_update_cases,
    "gdn_inputs": gdn_inputs_cases,
    "gdn_inputs_by_channel": gdn_inputs_by_channel_cases,
    "add_norm": add_norm_cases,
    "gated_group_norm": gated_group_norm_cases,
    "attention_inputs": attention_inputs_cases,
    "norm_matmul": norm_matmul_cases,
    "split_matmul": split_matmul_cases,
    "gated_matmul": gated_matmul_cases,
    "gated_norm_matmul": gated_norm_matmul_cases,
    "grouped_matmul": grouped_matmul_cases,
    "matmul_silu": matmul_silu_cases,
    "matmul_squared_relu": matmul_squared_relu_cases,
    "argmax_matmul": argmax_matmul_cases,
    "moe_feed_forward": moe_feed_forward_cases,
    "latent_moe_feed_forward": latent_moe_feed_forward_cases,
    "state_select": state_select_cases,
    "slot_mapping": slot_mapping_cases,
    "latent_attention": latent_attention_cases,
    "latent_prefill_attention": latent_prefill_attention_cases,
    "paged_attention": paged_attention_cases,
    "window_attention": window_attention_cases,
    "prefill_attention": prefill_attention_cases,
    "window_prefill": window_prefill_cases,
}
