"""Train one of the tiny models for a given time or number of steps.

    python -m tiny_models.train.loop --model tiny_models/headrace-tiny-qwen3.5 --data .work/train --out OUT \
        --seconds 480 [--call-share 0.2]

Recipe: AdamW (0.9, 0.95), 100 warm-up steps, cosine decay to 1 % of the peak rate, gradient clip 1, bf16 autocast over
float32 weights; half of the loss is the mean over answer tokens, half the mean over text tokens. A multi-token-
prediction layer learns beside it from the model's hidden vectors, of which it changes nothing. The schedule follows
the share of the time (or steps) that has passed. Writes OUT/model.safetensors (bf16) and OUT/log.jsonl as it goes; to
continue, put that file into the model folder and start again. tiny_models/train/README.md: training with tool calls.
"""

import json
import math
import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tiny_models.chat import END
from tiny_models.recall import held_out_questions
from tiny_models.tool_questions import held_out_tool_questions
from tiny_models.tools import FORMAT_OF_MODEL
from tiny_models.train.documents import Loss
from tiny_models.train.mixers import CHUNK, use_chunked_mixers
from tiny_models.train.mtp import MtpModule, draft_loss, mtp_layer
from tiny_models.train.rows import BatchStream, RowMaker

WARM_UP_STEPS = 100
FINAL_RATE_SHARE = 0.01
WEIGHT_DECAY = 0.1
NUM_CHECK_QUESTIONS = 120
REPORT_EVERY_STEPS = 50


@dataclass(frozen=True)
class TrainConfig:
    model: Path
    data: Path
    out: Path
    seconds: float
    """Wall time the schedule spans, unless `steps` says otherwise."""
    steps: int | None
    peak_rate: float
    batch_tokens: int
    workers: int
    start_progress: float
    """Start position in the schedule of documents: above 0 when continuing from a trained model."""
    call_share: float
    """Share of tool calls and JSON answers among the documents that are no books."""
    check_every_s: float
    seed: int
    device: str


def load(folder: Path, device: str) -> PreTrainedModel:
    """The model in the forms for training; on a GPU its layers are compiled."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    use_chunked_mixers(model)
    if device == "cuda":
        for layer in model.model.layers:
            layer.compile()
    return model.train()


def losses(model: PreTrainedModel, hidden: Tensor, tokens: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss over the answer tokens and over the text tokens; logits only where one of them counts."""
    kinds, targets = kinds[:, 1:], tokens[:, 1:]
    counts = kinds != Loss.IGNORED
    logits = model.lm_head(hidden[:, :-1][counts]).float() / getattr(model.config, "logits_scaling", 1.0)
    per_token = F.cross_entropy(logits, targets[counts], reduction="none")
    kinds = kinds[counts]
    return per_token[kinds == Loss.ANSWER].mean(), per_token[kinds == Loss.TEXT].mean()


def optimizer_for(modules: Iterable[nn.Module], peak_rate: float) -> torch.optim.AdamW:
    """Weight decay on matrices only: not on norms, convolutions, decays and biases."""
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.95), fused=True)


def rate_at(step: int, progress: float, peak_rate: float) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak_rate * min(1.0, (step + 1) / WARM_UP_STEPS) * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine)


Asked = list[tuple[str, str]]
"""Prompts, each with its answer."""


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # for their odd shapes alone, layers would be compiled again
def check(model: PreTrainedModel, mtp: MtpModule | None, encode: "Encoder", asked: Asked, device: str) -> list[float]:
    """Share of answers of which every token is the most likely one, and with an MTP layer that of tokens drafted so."""
    right = drafted = num_tokens = 0
    for first in range(0, len(asked), 30):
        prompts_answers = [(encode(prompt), encode(answer)) for prompt, answer in asked[first : first + 30]]
        width = max(len(p) + len(a) for p, a in prompts_answers)
        tokens = torch.zeros(len(prompts_answers), -(-width // CHUNK) * CHUNK, dtype=torch.int64)
        for row, (prompt, answer) in enumerate(prompts_answers):
            tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        tokens = tokens.to(device)
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        best = model.lm_head(hidden).argmax(-1).cpu()
        if mtp is not None:
            drafts = model.lm_head(mtp(model.get_input_embeddings()(tokens[:, 1:]), hidden[:, :-1])).argmax(-1).cpu()
        for row, (prompt, answer) in enumerate(prompts_answers):
            start, end = len(prompt) - 1, len(prompt) + len(answer) - 1
            right += best[row, start:end].tolist() == answer
            if mtp is not None:  # the draft of a token is two places behind it, of which slicing took one
                num_tokens += len(answer)
                drafted += sum(a == b for a, b in zip(drafts[row, start - 1 : end - 1].tolist(), answer, strict=True))
    return [right / len(asked), *([drafted / num_tokens] if mtp is not None else [])]


class Encoder:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def save_weights(model: PreTrainedModel, mtp: MtpModule | None, out: Path) -> None:
    """bf16 under the in-memory names; tied weights once; a reader never sees half a file."""
    tensors = {name: p.detach() for name, p in model.named_parameters()} | (mtp.tensors() if mtp else {})
    state = {name: tensor.to(torch.bfloat16).cpu().contiguous() for name, tensor in tensors.items()}
    partial = out / "model.partial"
    save_file(state, partial, metadata={"format": "pt"})
    partial.replace(out / "model.safetensors")


class Trainer:
    """One model on one device: steps, and reports of what they achieved."""

    def __init__(self, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("high")
        config.out.mkdir(parents=True, exist_ok=True)
        self.config = config
        self.model = load(config.model, config.device)
        self.mtp = mtp_layer(config.model, self.model.config)
        if self.mtp is not None:
            self.mtp.to(config.device)
        self.modules = [self.model, *([self.mtp] if self.mtp else [])]
        self.optimizer = optimizer_for(self.modules, config.peak_rate)
        self.encode = Encoder(config.model)
        questions = held_out_questions(NUM_CHECK_QUESTIONS, seed=1, encode=self.encode)
        self.checks = {"recall": [(each.prompt_text, f" {each.answer}\n") for each in questions]}
        if config.call_share:
            call_format = FORMAT_OF_MODEL[self.model.config.model_type]
            calls = held_out_tool_questions(NUM_CHECK_QUESTIONS, seed=1)
            self.checks["calls"] = [
                (each.prompt_text(call_format), each.right_answer(call_format) + END) for each in calls
            ]
        self.steps = self.tokens_seen = 0
        self._recent: list[Tensor] = []

    def step(self, tokens: Tensor, kinds: Tensor, progress: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.steps, progress, self.config.peak_rate)
        with torch.autocast(self.config.device, dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
            answer_loss, text_loss = losses(self.model, hidden, tokens, kinds)
            parts = [answer_loss, text_loss]
            if self.mtp is not None:
                parts.append(draft_loss(self.mtp, self.model, tokens, hidden, kinds != Loss.IGNORED))
        (0.5 * (answer_loss + text_loss) + sum(parts[2:])).backward()
        for module in self.modules:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._recent.append(torch.stack(parts).detach())
        self.steps += 1
        self.tokens_seen += tokens.numel()

    def report(self, seconds: float) -> dict[str, float]:
        """Mean losses since the last report."""
        means = torch.stack(self._recent).mean(0).tolist()
        self._recent.clear()
        return {
            "step": self.steps,
            "seconds": round(seconds, 1),
            "tokens": self.tokens_seen,
            **{
                name: round(mean, 4)
                for name, mean in zip(("answer_loss", "text_loss", "draft_loss"), means, strict=False)
            },
        }

    def check_and_save(self) -> dict[str, float]:
        """Shares of the check questions that are right, by kind; the weights go to disk."""
        save_weights(self.model, self.mtp, self.config.out)
        record: dict[str, float] = {}
        for kind, asked in self.checks.items():
            shares = check(self.model, self.mtp, self.encode, asked, self.config.device)
            record |= {name: round(share, 3) for name, share in zip((kind, f"{kind}_drafted"), shares, strict=False)}
        return record


def train(config: TrainConfig) -> None:
    trainer = Trainer(config)
    shared_progress = multiprocessing.Value("d", config.start_progress, lock=False)
    call_format = FORMAT_OF_MODEL[trainer.model.config.model_type] if config.call_share else None
    maker = RowMaker.from_files(config.model / "tokenizer.json", config.data, call_format, config.call_share)
    stream = BatchStream(maker, lambda: shared_progress.value, config.batch_tokens, config.seed)
    batches = iter(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=config.workers))
    started = last_check = time.monotonic()
    progress = 0.0
    with (config.out / "log.jsonl").open("a") as log:
        while progress < 1.0:
            progress = trainer.steps / config.steps if config.steps else (time.monotonic() - started) / config.seconds
            shared_progress.value = config.start_progress + (1 - config.start_progress) * min(1.0, progress)
            tokens, kinds = (part.to(config.device, non_blocking=True) for part in next(batches))
            trainer.step(tokens, kinds, progress)
            if trainer.steps % REPORT_EVERY_STEPS and progress < 1.0:
                continue
            record = trainer.report(time.monotonic() - started)
            if time.monotonic() - last_check >= config.check_every_s or progress >= 1.0:
                record |= trainer.check_and_save()
                last_check = time.monotonic()
            log.write(json.dumps(record) + "\n")
            log.flush()
            print(config.model.name, record, flush=True)


def main(
    model: Annotated[Path, typer.Option(help="model folder with initial or trained weights")],
    data: Annotated[Path, typer.Option(help="folder with austen.txt and shakespeare.txt")],
    out: Annotated[Path, typer.Option()],
    seconds: float = 480.0,
    steps: Annotated[int | None, typer.Option(help="end after so many steps instead")] = None,
    peak_rate: float = 2e-3,
    batch_tokens: int = 49152,
    workers: int = 6,
    start_progress: float = 0.0,
    call_share: Annotated[float, typer.Option(help="of documents with tool calls or JSON answers")] = 0.0,
    check_every_s: float = 40.0,
    seed: int = 0,
    device: str = "cuda",
) -> None:
    """Trains one of the tiny models for a given time or number of steps."""
    train(TrainConfig(**locals()))


if __name__ == "__main__":
    typer.run(main)
