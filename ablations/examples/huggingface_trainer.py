"""Hugging Face's Trainer: its own clipping and schedule, a recipe as optimizer, the recorder as callback."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

from ablations.examples._small import batches
from toolkit.optim import make_optimizer
from traces.integrations.huggingface import RecorderCallback


def main(path: str | Path, steps: int = 8, recipe: str = "mesh") -> list[float]:
    """Train, record into `path`, return the logged losses."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=64,
        )
    )
    # The Trainer clips and unscales `.grad` itself, so momentum is kept apart from it.
    optimizer = make_optimizer(model, recipe, lr=3e-3, hidden_momentum="apart")
    data = [
        {"input_ids": ids, "labels": ids}  # the model shifts the labels itself
        for batch in batches(2 * steps)
        for ids in batch["input_ids"]
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[RecorderCallback(path)]
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "huggingface_trainer.trace"))
