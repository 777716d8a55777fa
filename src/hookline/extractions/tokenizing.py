"""Texts as a language model takes them."""

from __future__ import annotations

from typing import Any

import torch


class Tokenize:
    """Make tokens of a text with a tokenizer of transformers; works in other processes too."""

    def __init__(self, name: str, *, length: int | None = None) -> None:
        self._name = name
        self._length = length
        self._tokenizer: Any = None
        self._load()

    @property
    def __qualname__(self) -> str:
        """Tell one from another, in what a store says of itself."""
        return f"Tokenize({self._name}, length={self._length})"

    def __call__(self, text: Any) -> dict[str, Any]:
        """Give the tokens of one text."""
        if not isinstance(text, str):
            raise TypeError(
                f"a tokenizer takes texts, and a sample is a {type(text).__name__}: name the field "
                "of it that is the text with column="
            )
        self._load()
        made = self._tokenizer(text, truncation=self._length is not None, max_length=self._length)
        return {"input_ids": torch.tensor(made["input_ids"])}

    def __getstate__(self) -> dict[str, Any]:
        return {"_name": self._name, "_length": self._length, "_tokenizer": None}

    def _load(self) -> None:
        if self._tokenizer is None:
            try:
                from transformers import AutoTokenizer
            except ImportError:
                raise ImportError(
                    'a tokenizer needs transformers: pip install "hookline[transformers]"'
                ) from None
            self._tokenizer = AutoTokenizer.from_pretrained(self._name)
