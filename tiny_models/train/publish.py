"""Put trained weights into a model folder: bf16, on-disk names, generation config.

python -m tiny_models.train.publish --weights OUT/model.safetensors --model tiny_models/headrace-tiny-qwen3.5 [--calls]
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tiny_models.tools import FORMAT_OF_MODEL, chat_template
from tiny_models.train.architectures import EOS_ID, PAD_ID
from tiny_models.train.mtp import MTP_PREFIX


def publish(weights: Path, folder: Path, *, calls: bool = False) -> None:
    """Load `weights` (in-memory names, tied weights once) into the folder's architecture and save it there.

    calls   they were trained to call tools: the folder gets the chat template for that
    """
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    tensors = load_file(weights)
    mtp = {name: tensors.pop(name) for name in list(tensors) if name.startswith(MTP_PREFIX)}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{weights} does not fit {folder}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | mtp, file, metadata={"format": "pt"})
    if calls:
        template = chat_template(FORMAT_OF_MODEL[model.config.model_type])
        (folder / "chat_template.jinja").write_text(template)


def main(weights: Annotated[Path, typer.Option()], model: Annotated[Path, typer.Option()], calls: bool = False) -> None:
    """Puts trained weights into a model folder."""
    publish(weights, model, calls=calls)


if __name__ == "__main__":
    typer.run(main)
