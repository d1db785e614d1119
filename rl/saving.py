"""Saving a study and putting it back: one save holds everything that the next step depends on."""

import jax
from rich.console import Console

from model import checkpoint
from model.peft import save_adapter
from rl.config import ConfigError, differences, from_json, to_json
from rl.run_dir import RunDir
from rl.study import Study


def save(study: Study, run_dir: RunDir) -> None:
    """One save holds everything: adapters, optimiser, step, config and how long each log was."""
    meta = {"config": to_json(study.config), "log_bytes": run_dir.sizes(), "data": fingerprints(study)}
    checkpoint.save(run_dir.checkpoints, int(study.state.step), study.state, meta)


def restore(study: Study, run_dir: RunDir, console: Console) -> int:
    """Put study and logs back to the newest whole checkpoint; returns its step (0: there was none yet)."""
    try:
        restored = checkpoint.restore(run_dir.checkpoints, study.state)
    except FileNotFoundError:
        run_dir.rewind({})
        console.print("no checkpoint was saved yet: starting from the first step", markup=False)
        return 0
    for line in restored.skipped:
        console.print(f"warning: {line}", style="yellow", markup=False, soft_wrap=True)
    changed = differences(from_json(restored.meta["config"]), study.config)
    if changed:
        raise ConfigError(f"{run_dir.path}/config.json was changed since the checkpoint: " + "; ".join(changed))
    other = [name for name, value in fingerprints(study).items() if restored.meta["data"][name] != value]
    if other:
        raise ConfigError(f"{' and '.join(other)} changed since the run in {run_dir.path} began; put the old back")
    study.state = jax.tree.map(jax.numpy.asarray, restored.arrays)
    study.policy.lora = study.state.lora
    run_dir.rewind(restored.meta["log_bytes"])
    console.print(f"resumed after step {restored.step} of {study.config.steps}", markup=False)
    return restored.step


def fingerprints(study: Study) -> dict[str, str]:
    """What a resumed run must find as it was."""
    return {
        "problems": study.problems.fingerprint,
        "tokenizer": study.tokenizer.fingerprint,
        "base model": study.base_fingerprint,
    }


def save_adapters(study: Study, run_dir: RunDir) -> None:
    """Every cell's adapter in PEFT's format."""
    for x, cell in enumerate(study.cells):
        one = jax.device_get(jax.tree.map(lambda leaf, x=x: leaf[x], study.state.lora))
        save_adapter(run_dir.adapters / cell.name, one, study.lora_config, study.config.model)
