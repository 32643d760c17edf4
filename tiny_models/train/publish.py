"""Put trained weights into a model folder: bf16, on-disk names, generation config.

python -m tiny_models.train.publish --weights OUT/model.safetensors --model tiny_models/headrace-tiny-qwen3.5
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tiny_models.train.architectures import EOS_ID, PAD_ID


def publish(weights: Path, folder: Path) -> None:
    """Load `weights` (in-memory names, tied weights once) into the folder's architecture and save it there."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{weights} does not fit {folder}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()
    publish(arguments.weights, arguments.model)


if __name__ == "__main__":
    main()
