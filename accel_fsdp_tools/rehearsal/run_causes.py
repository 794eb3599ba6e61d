"""Why a script does not repeat itself, or fails: causes that have nothing to do with a resume."""

from __future__ import annotations

from collections.abc import Sequence

from .causes import Cause
from .comparing import Difference, Thing
from .records import Record

# -- runs without a break that differ ---------------------------------------------------------------------------------


def explain_unrepeatable(differences: Sequence[Difference]) -> Cause:
    """Say why two runs of the same script differ although neither was interrupted."""
    first = differences[0]
    beside = {each.thing for each in differences if each.step == first.step}
    if first.thing in (Thing.PARAMETERS_BEFORE, Thing.OPTIMIZER_BEFORE):
        return Cause(
            "unseeded-model",
            "the model begins with other parameters in every run",
            "Call set_seed before the model is made.",
        )
    if first.thing is Thing.NUM_BATCHES:
        return Cause("unsteady-batches", "an update is made of another number of batches in every run", _LOOK_FOR_TIME)
    if first.thing is Thing.INDICES:
        return Cause(
            "unseeded-order",
            "the data comes in another order in every run",
            "Call set_seed before the loader is iterated, or give it a seeded generator.",
        )
    if first.thing is Thing.GENERATORS:
        return Cause(
            "unseeded-generators",
            f"the random generators ({', '.join(first.names)}) are other in every run",
            "Call set_seed at the beginning of the script, with device_specific=True for ranks of their own.",
        )
    if first.thing is Thing.BATCH:
        return Cause(
            "unseeded-data",
            "the dataset or its collate function draws from an unseeded generator, or the dataset lists its samples in "
            "another order: the same indices have another content in every run",
            "Sort what it lists (files, sets). Give the generator a seed (numpy.random.default_rng(seed)), or draw "
            "from the global ones, which set_seed seeds; in workers, by worker_init_fn or torch.initial_seed().",
            ("indices and global random generators are the same",) if Thing.GENERATORS not in beside else (),
        )
    if first.thing is Thing.INPUTS:
        return Cause(
            "unseeded-inputs",
            "what the script makes of the batch before the model takes it is other in every run",
            "Seed what it draws there.",
        )
    if first.thing is Thing.GENERATORS_AFTER_FORWARD:
        return Cause("unsteady-forward", "the forward pass draws other random numbers in every run", _LOOK_FOR_TIME)
    if first.thing is Thing.NUM_UPDATES:
        return Cause("unsteady-updates", "the optimizer makes its updates at other steps in every run", _LOOK_FOR_TIME)
    if first.thing is Thing.LEARNING_RATE:
        return Cause("unsteady-rate", "the learning rate is other in every run", _LOOK_FOR_TIME)
    if first.thing in (Thing.LOSS, Thing.GRADIENTS, Thing.GRADIENT_NORM):
        where = "forward" if first.thing is Thing.LOSS else "backward"
        return Cause(
            "non-deterministic-op",
            f"an operation of the {where} pass is not deterministic: the same batch, parameters and random generators "
            f"give another {first.thing.value} in every run",
            "torch.use_deterministic_algorithms(True) with CUBLAS_WORKSPACE_CONFIG=:4096:8 names it or makes it "
            "deterministic; flash attention has a deterministic mode of its own. Also look for a generator that is "
            "seeded with the time.",
        )
    if first.thing is Thing.GENERATORS_AFTER:
        return Cause("unsteady-draws", "the script draws other random numbers in every run", _LOOK_FOR_TIME)
    return Cause(
        "non-deterministic-update",
        "the update is not deterministic: the same gradients lead elsewhere in every run",
        "Try the optimizer with fused=False and foreach=False.",
    )


_LOOK_FOR_TIME = "Look for decisions that hang on the time, on a race, or on an unseeded generator."


def explain_save() -> Cause:
    """Say why a run in which a checkpoint was saved differs from one without, where both repeat themselves."""
    return Cause(
        "save-changes-run",
        "saving a checkpoint changes the run that saves",
        "Look for hooks of the script that run at a save (register_save_state_pre_hook, on_save) and draw random "
        "numbers or change the model.",
    )


# -- a run that fails -------------------------------------------------------------------------------------------------


def explain_error(error: Record) -> Cause:
    """Say why a run ended with an error, which is named in any case."""
    kind, message, setup = str(error["type"]), str(error["message"]), dict(error.get("setup") or {})
    said = (f"{kind}: {message}",)
    if not error.get("is_own"):
        return Cause("script-failed", "the script failed", "Its log says where.", said)
    if "skip_first_batches" in message:
        return Cause(
            "data-skipped-twice",
            "data is skipped twice, which the package refuses: the script skips by itself what the prepared loader "
            "skips already",
            "Take out the script's skip_first_batches: after resume() the prepared loader goes on by itself.",
            said,
        )
    if kind == "CallOrderError" and "not told to resume" in " ".join(message.split()):
        return Cause(
            "never-resumes",
            "the script did not ask for a resume, which the package refuses where an earlier run's checkpoints are",
            "trainer.train(resume_from_checkpoint=latest_checkpoint(output_dir)), with latest_checkpoint of this "
            "package: get_last_checkpoint of transformers looks into the script's own folder, not the rehearsal's.",
            said,
        )
    if kind == "MismatchError" and "elastic" in message:
        return Cause(
            "elastic-refused",
            "the script refuses to resume on another number of ranks",
            'Permit it: Checkpointer(..., elastic="exact") with arguments that keep batch size x ranks x accumulation '
            '(--elastic-args "--accumulate 2").',
            said,
        )
    if "scheduler" in message.lower() and kind == "CallOrderError":
        return Cause(
            "scheduler-not-prepared",
            "the scheduler was forgotten, which the package refuses: it is neither prepared nor registered",
            "Pass it to accelerator.prepare, or to accelerator.register_for_checkpointing.",
            said,
        )
    if setup.get("models") and not setup.get("optimizers"):
        return Cause(
            "optimizer-not-prepared",
            "no optimizer is prepared, which the package refuses",
            "Pass the optimizer to accelerator.prepare together with the model.",
            said,
        )
    return Cause("refused", f"the package refused with {kind}", "Do what the message says.", said)
