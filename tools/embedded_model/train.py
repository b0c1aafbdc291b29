"""Trains the trunk and the MTP head together, then distils the head from the finished trunk.

    python -m tools.embedded_model.train CORPUS_DIR OUT_DIR

Writes OUT_DIR/model.safetensors (published names and dtypes), OUT_DIR/joint.safetensors (the same
before distillation) and OUT_DIR/training.json (what was run and measured).
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from tools.embedded_model import model, storage
from tools.embedded_model.distil import distil
from tools.embedded_model.layers import ModelConfig, Params
from tools.embedded_model.settings import TrainSettings, random_rows

LOG_EVERY = 100
HELD_OUT_EVERY = 500


def cross_entropy(
    logits: Float[Array, "B T vocab"], targets: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def joint_loss(
    params: Params,
    rows: Int[Array, "B T+1"],
    key: Array,
    config: ModelConfig,
    settings: TrainSettings,
):
    """The trunk's cross entropy plus the weighted ones of the head; also each, [1 + depths]."""
    length = rows.shape[1] - 1
    hidden = model.trunk(params, rows[:, :-1], config, settings.dropout, key)
    losses = [cross_entropy(model.logits(params, hidden, config), rows[:, 1:]).mean()]
    depths = range(1, 1 + len(settings.depth_weights))
    inputs = [jnp.roll(rows, -depth, 1)[:, :-1] for depth in depths]
    for depth, state in zip(depths, model.mtp_chain(params, inputs, hidden, config), strict=True):
        losses.append(
            cross_entropy(
                model.logits(params, state, config), jnp.roll(rows, -depth - 1, 1)[:, :-1]
            )[:, : length - depth].mean()
        )
    losses = jnp.stack(losses)
    weights = jnp.asarray([1.0, *settings.depth_weights])
    return jnp.dot(losses, weights), losses


def is_decayed(params: Params) -> dict[str, bool]:
    """Weight decay applies to the projections only."""
    return {name: value.ndim == 2 and "embed_tokens" not in name for name, value in params.items()}


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        settings.learning_rate,
        int(settings.warmup_share * settings.steps),
        settings.steps,
        settings.final_learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, 0.9, 0.95, weight_decay=settings.weight_decay, mask=is_decayed),
    )


@functools.partial(
    jax.jit, static_argnames=("config", "settings"), donate_argnames=("params", "moments")
)
def train_step(
    params: Params, moments, data: Array, key: Array, config: ModelConfig, settings: TrainSettings
):
    row_key, dropout_key = jax.random.split(key)
    rows = random_rows(data, row_key, settings.batch, settings.length + 1)
    grads, losses = jax.grad(joint_loss, has_aux=True)(params, rows, dropout_key, config, settings)
    updates, moments = make_optimizer(settings).update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, losses


@functools.partial(jax.jit, static_argnames=("config",))
def row_losses(
    params: Params, rows: Int[Array, "B T+1"], config: ModelConfig
) -> Float[Array, " B"]:
    return cross_entropy(
        model.logits(params, model.trunk(params, rows[:, :-1], config), config), rows[:, 1:]
    ).mean(-1)


def held_out_loss(
    params: Params, data: Int[Array, " N"], config: ModelConfig, settings: TrainSettings
) -> float:
    """Mean nats per token over consecutive windows of the held-out stream."""
    width = settings.length + 1
    rows = data[: data.shape[0] // width * width].reshape(-1, width).astype(jnp.int32)
    return float(np.mean(np.asarray(row_losses(params, rows, config))))


def train_jointly(
    data: Array, held_out: Array, config: ModelConfig, settings: TrainSettings
) -> tuple[Params, list[dict]]:
    """The trained weights and the log: losses in nats per token."""
    params = model.init_params(config, settings.seed)
    moments = make_optimizer(settings).init(params)
    key, log, start = jax.random.key(settings.seed), [], time.perf_counter()
    for step in range(1, settings.steps + 1):
        params, moments, losses = train_step(
            params, moments, data, jax.random.fold_in(key, step), config, settings
        )
        if step in (1, 20) or step % LOG_EVERY == 0 or step == settings.steps:
            entry = {"step": step, "losses": np.asarray(losses, np.float64).round(4).tolist()}
            if step % HELD_OUT_EVERY == 0 or step == settings.steps:
                entry["held_out"] = round(held_out_loss(params, held_out, config, settings), 4)
            entry["seconds"] = round(time.perf_counter() - start, 1)
            print(json.dumps(entry), flush=True)
            log.append(entry)
    return params, log


def parse_arguments() -> tuple[pathlib.Path, pathlib.Path, TrainSettings]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus_dir", type=pathlib.Path)
    parser.add_argument("out_dir", type=pathlib.Path)
    for field in ("steps", "distil_steps", "batch", "length", "sample_rows"):
        default = getattr(TrainSettings, field)
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=default)
    arguments = vars(parser.parse_args())
    return arguments.pop("corpus_dir"), arguments.pop("out_dir"), TrainSettings(**arguments)


def main() -> None:
    corpus_dir, out_dir, settings = parse_arguments()
    out_dir.mkdir(parents=True, exist_ok=True)
    config = ModelConfig()
    data, held_out = (
        jnp.asarray(np.load(corpus_dir / f"{split}.npy")) for split in ("train", "held_out")
    )

    start = time.perf_counter()
    params, joint_log = train_jointly(data, held_out, config, settings)
    params = storage.round_to_published(params)
    storage.save_published(params, out_dir / "joint.safetensors")
    joint_seconds = time.perf_counter() - start

    params, distil_log = distil(params, data, config, settings)
    storage.save_published(params, out_dir / "model.safetensors")
    record = {
        "settings": dataclasses.asdict(settings),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "joint_seconds": round(joint_seconds, 1),
        "distil_seconds": round(time.perf_counter() - start - joint_seconds, 1),
        "date": datetime.date.today().isoformat(),
        "parameters": sum(value.size for value in params.values()),
        "head_parameters": sum(
            value.size for name, value in params.items() if name.startswith("mtp.")
        ),
        "joint": joint_log,
        "distil": distil_log,
    }
    (out_dir / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
