"""The last phase: the trunk is frozen and the MTP head learns to say what the trunk will say.

Speculation accepts a draft when the trunk agrees with it, so the target is the trunk's own
distribution rather than the text, and half of every batch is text that the trunk wrote.
"""

import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from tools.embedded_model import decode, model
from tools.embedded_model.layers import ModelConfig, Params
from tools.embedded_model.settings import TrainSettings, random_rows

LOG_EVERY = 100


def write_samples(
    params: Params, data: Array, key: Array, config: ModelConfig, settings: TrainSettings
):
    """[sample_rows, length] tokens: pieces of real text, each continued by the trunk.

    The first half of the rows is continued greedily, the other at `sample_temperature`.
    """
    row_key, noise_key = jax.random.split(key)
    rows = random_rows(data, row_key, settings.sample_rows, settings.length)
    is_given = jnp.arange(settings.length) % settings.sample_period < settings.sample_given
    is_greedy = jnp.arange(settings.sample_rows) < settings.sample_rows // 2
    temperature = jnp.where(is_greedy, 0.0, settings.sample_temperature)
    return decode.write(
        params, rows, jnp.broadcast_to(is_given, rows.shape), temperature, noise_key, config
    )


def distil_loss(
    head: Params,
    frozen: Params,
    rows: Int[Array, "B T"],
    config: ModelConfig,
    settings: TrainSettings,
):
    """The weighted KL divergences of the head's depths from the trunk; also each one, [depths]."""
    params = frozen | head
    hidden = jax.lax.stop_gradient(model.trunk(params, rows, config))
    target = jax.nn.log_softmax(model.logits(params, hidden, config))
    depths = range(1, 1 + len(settings.distil_depth_weights))
    inputs = [jnp.roll(rows, -depth, 1) for depth in depths]
    losses = []
    for depth, state in zip(depths, model.mtp_chain(params, inputs, hidden, config), strict=True):
        guess = jax.nn.log_softmax(model.logits(params, state, config))
        divergence = optax.losses.kl_divergence_with_log_targets(
            guess[:, :-depth], target[:, depth:]
        )
        losses.append(divergence.mean())
    losses = jnp.stack(losses)
    return jnp.dot(losses, jnp.asarray(settings.distil_depth_weights)), losses


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    warmup = int(settings.warmup_share * settings.distil_steps)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.distil_learning_rate, warmup, settings.distil_steps
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, 0.9, 0.95, weight_decay=0.0)
    )


@functools.partial(
    jax.jit, static_argnames=("config", "settings"), donate_argnames=("head", "moments")
)
def distil_step(
    head: Params,
    moments,
    frozen: Params,
    data,
    samples,
    key,
    config: ModelConfig,
    settings: TrainSettings,
):
    real_key, sample_key = jax.random.split(key)
    real = random_rows(data, real_key, settings.batch // 2, settings.length)
    own = samples[
        jax.random.randint(sample_key, (settings.batch - settings.batch // 2,), 0, samples.shape[0])
    ]
    grads, losses = jax.grad(distil_loss, has_aux=True)(
        head, frozen, jnp.concatenate([real, own]), config, settings
    )
    updates, moments = make_optimizer(settings).update(grads, moments, head)
    return optax.apply_updates(head, updates), moments, losses


def distil(
    params: Params, data: Array, config: ModelConfig, settings: TrainSettings
) -> tuple[Params, list[dict]]:
    """`params` with a head trained further, and the log: KL in nats per token at each depth."""
    head = {name: value for name, value in params.items() if name.startswith("mtp.")}
    frozen = {name: value for name, value in params.items() if name not in head}
    key, log, start = jax.random.key(settings.seed + 1), [], time.perf_counter()
    samples = write_samples(params, data, jax.random.fold_in(key, 0), config, settings)
    moments = make_optimizer(settings).init(head)
    for step in range(1, settings.distil_steps + 1):
        step_key = jax.random.fold_in(key, step)
        head, moments, losses = distil_step(
            head, moments, frozen, data, samples, step_key, config, settings
        )
        if step == 1 or step % LOG_EVERY == 0 or step == settings.distil_steps:
            seconds = round(time.perf_counter() - start, 1)
            log.append(
                {
                    "step": step,
                    "divergences": np.asarray(losses, np.float64).round(4).tolist(),
                    "seconds": seconds,
                }
            )
            print(json.dumps(log[-1]), flush=True)
    return frozen | head, log
