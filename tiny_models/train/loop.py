"""Train one of the tiny models for a given time or number of steps.

    python -m tiny_models.train.loop --model tiny_models/headrace-tiny-qwen3.5 --data .work/train --out OUT \
        --seconds 480 [--call-share 0.2]

Recipe: AdamW (0.9, 0.95), 100 warm-up steps, cosine decay to 1 % of the peak rate, gradient clip 1, bf16 autocast over
float32 weights; half of the loss is the mean over answer tokens, half the mean over text tokens. The schedule follows
the share of the time (or steps) that has passed. Writes OUT/model.safetensors (bf16) and OUT/log.jsonl as it goes; to
continue, put that file into the model folder and start again. tiny_models/train/README.md: training with tool calls.
"""

import json
import math
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tiny_models.chat import END
from tiny_models.recall import held_out_questions
from tiny_models.tool_questions import held_out_tool_questions
from tiny_models.tools import FORMAT_OF_MODEL
from tiny_models.train.documents import Loss
from tiny_models.train.mixers import CHUNK, use_chunked_mixers
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
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    use_chunked_mixers(model)
    return model.train()


def losses(model: PreTrainedModel, tokens: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss over the answer tokens and over the text tokens; logits only where one of them counts."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    kinds, targets = kinds[:, 1:], tokens[:, 1:]
    counts = kinds != Loss.IGNORED
    logits = model.lm_head(hidden[counts]).float() / getattr(model.config, "logits_scaling", 1.0)
    per_token = F.cross_entropy(logits, targets[counts], reduction="none")
    kinds = kinds[counts]
    return per_token[kinds == Loss.ANSWER].mean(), per_token[kinds == Loss.TEXT].mean()


def optimizer_for(model: PreTrainedModel, peak_rate: float) -> torch.optim.AdamW:
    """Weight decay on matrices only: not on norms, convolutions, decays and biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.95))


def rate_at(step: int, progress: float, peak_rate: float) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak_rate * min(1.0, (step + 1) / WARM_UP_STEPS) * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine)


@torch.no_grad()
def share_right(model: PreTrainedModel, encode: "Encoder", asked: list[tuple[str, str]], device: str) -> float:
    """Share of (prompt, answer) whose answer is the most likely token at every step: greedy decoding would state it."""
    right = 0
    for first in range(0, len(asked), 30):
        prompts_answers = [(encode(prompt), encode(answer)) for prompt, answer in asked[first : first + 30]]
        width = max(len(p) + len(a) for p, a in prompts_answers)
        tokens = torch.zeros(len(prompts_answers), -(-width // CHUNK) * CHUNK, dtype=torch.int64)
        for row, (prompt, answer) in enumerate(prompts_answers):
            tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        best = model(tokens.to(device), use_cache=False).logits.argmax(-1).cpu()
        for row, (prompt, answer) in enumerate(prompts_answers):
            right += best[row, len(prompt) - 1 : len(prompt) + len(answer) - 1].tolist() == answer
    return right / len(asked)


class Encoder:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def save_weights(model: PreTrainedModel, out: Path) -> None:
    """bf16 under the in-memory names; tied weights once; a reader never sees half a file."""
    state = {name: p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in model.named_parameters()}
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
        self.optimizer = optimizer_for(self.model, config.peak_rate)
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
            answer_loss, text_loss = losses(self.model, tokens, kinds)
        (0.5 * (answer_loss + text_loss)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._recent.append(torch.stack([answer_loss.detach(), text_loss.detach()]))
        self.steps += 1
        self.tokens_seen += tokens.numel()

    def report(self, seconds: float) -> dict[str, float]:
        """Mean losses since the last report."""
        answer_loss, text_loss = torch.stack(self._recent).mean(0).tolist()
        self._recent.clear()
        return {
            "step": self.steps,
            "seconds": round(seconds, 1),
            "tokens": self.tokens_seen,
            "answer_loss": round(answer_loss, 4),
            "text_loss": round(text_loss, 4),
        }

    def check_and_save(self) -> dict[str, float]:
        """Shares of the check questions that are right, by kind; the weights go to disk."""
        save_weights(self.model, self.config.out)
        return {
            kind: round(share_right(self.model, self.encode, asked, self.config.device), 3)
            for kind, asked in self.checks.items()
        }


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
