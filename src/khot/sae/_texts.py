"""The tokens behind activations, and their documents."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

NUMBERS = 2**24  # more than any vocabulary has; the texts of all smaller numbers are held


@dataclass(frozen=True, eq=False)
class Tokens:
    """One token for each row of activations: numbers of a vocabulary, and the document of each.

    Examples:
        >>> tokens = khot.sae.Tokens.of([["to", "be"], ["or", "not", "to", "be"]])
        >>> len(tokens), tokens.documents.tolist(), tokens.text(3)
        (6, [0, 0, 1, 1, 1, 1], 'not')
    """

    ids: np.ndarray[Any, Any]
    """(tokens,) integers."""
    vocabulary: Sequence[str]
    """The text of each number."""
    documents: np.ndarray[Any, Any] | None = None
    """A number for each row, (tokens,), equal within a document; None if they are not known."""

    @classmethod
    def of(cls, texts: Iterable[str] | Iterable[Sequence[str]]) -> "Tokens":
        """Take a list of tokens, or a list of documents that are lists of tokens."""
        parts = list(texts)
        is_split = bool(parts) and not isinstance(parts[0], str)
        flat = list(chain.from_iterable(parts)) if is_split else parts
        if not all(isinstance(token, str) for token in flat):
            raise TypeError("`texts` must be strings, or lists of strings, and not both.")
        numbers: dict[Any, int] = {}
        ids = np.fromiter((numbers.setdefault(token, len(numbers)) for token in flat), np.int64, len(flat))
        documents = np.repeat(np.arange(len(parts)), [len(part) for part in parts]) if is_split else None
        return cls(ids, list(numbers), documents)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    def text(self, row: int) -> str:
        """Return the token of a row."""
        return self.vocabulary[int(self.ids[row])]


def open_tokens(path: str | os.PathLike[str], vocabulary: Sequence[str] | None = None) -> Tokens:
    """Read the tokens of activations, in the order of their rows.

    Args:
        path: a .jsonl file, each line of which is a token (a JSON string) or a document (a list of strings); a .txt
            file with a token on each line, whose empty lines end documents; or a .npy file of token numbers, (tokens,)
            or (documents, length), for which `vocabulary` has the texts.
        vocabulary: the text of each number, for a .npy file.
    """
    path = Path(path)
    if path.suffix == ".npy":
        return _numbers(path, vocabulary)
    if path.suffix not in (".jsonl", ".txt"):
        raise ValueError(f"{path} must be a .jsonl, .txt or .npy file of tokens; got {path.suffix or 'no suffix'!r}")
    lines = _lines(path)
    if path.suffix == ".txt":
        documents: list[list[str]] = [[]]
        for line in lines:
            if line:
                documents[-1].append(line)
            else:
                documents.append([])
        found = [document for document in documents if document]
        return Tokens.of(found if len(found) > 1 else chain.from_iterable(found))
    values = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError:
            raise ValueError(f"{path} must have JSON on each line; line {number} is not") from None
        is_list = isinstance(value, list) and all(isinstance(token, str) for token in value)
        if not isinstance(value, str) and not is_list:
            raise ValueError(f"{path} must have a string or a list of strings on each line; line {number} has neither")
        values.append(value)
    if len({type(value) for value in values}) > 1:
        raise ValueError(f"{path} must have strings or lists of strings, and not both")
    return Tokens.of(values)


def open_vocabulary(path: str | os.PathLike[str]) -> list[str]:
    """Read the texts of token numbers: a .json file, a list or an object {text: number}; or a .txt file, one a line."""
    path = Path(path)
    if path.suffix != ".json":
        return _lines(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be a JSON file in UTF-8; got: {error}") from None
    if isinstance(found, dict):
        odd = [n for n in found.values() if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < NUMBERS]
        if odd:
            raise ValueError(f"{path} must have token numbers from 0 to {NUMBERS - 1}; got {odd[0]!r}")
        texts = [f"<{number}>" for number in range(1 + max(found.values(), default=-1))]
        for text, number in found.items():
            texts[number] = text
        return texts
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{path} must hold a list of strings or an object {{text: number}}")
    return found


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, which end in a newline alone: a token may hold other separators."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} must be in UTF-8") from None
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _numbers(path: Path, vocabulary: Sequence[str] | None) -> Tokens:
    try:
        with path.open("rb") as file:
            ids = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} must be a complete .npy file; got: {error}") from None
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise ValueError(f"{path} must hold integers, (tokens,) or (documents, length); got {ids.dtype} {ids.shape}")
    if vocabulary is None:
        raise ValueError(f"{path} holds numbers of tokens: give the vocabulary that has their texts")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(vocabulary):
        got = f"{int(ids.min())} to {int(ids.max())}"
        raise ValueError(f"{path} must have numbers below {len(vocabulary)}, the size of the vocabulary; got {got}")
    documents = np.repeat(np.arange(len(ids)), ids.shape[1]) if ids.ndim == 2 else None
    return Tokens(ids.ravel().astype(np.int64), vocabulary, documents)
