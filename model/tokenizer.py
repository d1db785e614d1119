"""Chat prompts to token ids and sampled ids to text, where text is never control.

The chat template is rendered once for each sequence of roles, with markers where the contents go, and cut at its
control tokens. What lies between two control tokens is filled with the contents and encoded whole, by a second
tokenizer that knows no added tokens. So a literal "<|im_end|>" in a content is eight letters like any others, while
ordinary contents get exactly the ids that `transformers` gives them, merges across the template's edges included.
Left out: tools, images, and templates that rewrite contents in any way but stripping them (refused at load).
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from model.weights import read_json, resolve

Message = dict[str, str]
Piece = int | tuple[str | int, ...]
"""A control token's id, or text between two: literal parts, and the indices of the messages whose contents go there."""

MARK = "\ue000{}\ue001"
MARKED = re.compile("\ue000([0-9]+)\ue001")
UNKNOWN = "\ufffd"
PROBES = (
    "How much is 3 + 4?",
    "  two  spaces, \ttab, 1234.5 café \U0001f600 \n\n",
    "",
    "\n<think>\nhm\n</think>\n\nSeven.\n",
)


class TokenizerError(ValueError):
    """A tokenizer or a prompt that can't be used; the message says what, where and what to do."""


class ChatTokenizer:
    """Tokenizer and chat template of one checkpoint.

    end_of_turn   ids that end a turn, the template's own first
    pad           an id for padding; may equal one of `end_of_turn`, so derive no mask from it
    base_vocab    one more than the highest id with a token (151,665 for Qwen2.5); embeddings may have more rows
    fingerprint   sha256 of tokenizer.json and the template, for results
    """

    def __init__(self, directory: Path) -> None:
        directory = Path(directory)
        if not (directory / "tokenizer.json").is_file():
            raise TokenizerError(f"{directory} has no tokenizer.json; save it once with transformers' AutoTokenizer")
        self.directory = directory
        # Here, because it takes seconds. Not AutoTokenizer: by a config.json that says "qwen2" it reads any
        # tokenizer.json as Qwen's own byte-level BPE.
        from transformers import PreTrainedTokenizerFast

        self._hf = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
        if not isinstance(self._hf.chat_template, str):
            raise TokenizerError(f"{directory} has no chat template (chat_template.jinja, or in tokenizer_config.json)")
        raw = (directory / "tokenizer.json").read_text(encoding="utf-8")
        self.fingerprint = hashlib.sha256((raw + "\0" + self._hf.chat_template).encode()).hexdigest()
        self._whole = Tokenizer.from_str(raw)
        self._text = _without_added_tokens(self._whole)
        vocabulary = self._whole.get_vocab(with_added_tokens=True)
        self.base_vocab = max(vocabulary.values()) + 1
        self._has_token = np.zeros(self.base_vocab, bool)
        self._has_token[list(vocabulary.values())] = True
        # An unknown character may well become <unk>: it is an added token in some files, but it controls nothing.
        added = {one.content: id_ for id_, one in self._whole.get_added_tokens_decoder().items()}
        self._control = {text: id_ for text, id_ in added.items() if text != self._hf.unk_token or id_ in self._eos()}
        self._control_ids = frozenset(self._control.values())
        self._ordinary = self._has_token.copy()
        self._ordinary[list(self._control_ids)] = False
        longest_first = sorted(self._control, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._pieces: dict[tuple[str, ...], list[Piece]] = {}
        self._stripped: frozenset[str] = frozenset()
        self._check_control()
        self._check_template()
        self.end_of_turn = self._find_end_of_turn()
        self.pad = self._hf.pad_token_id if self._hf.pad_token_id is not None else self.end_of_turn[0]

    @classmethod
    def load(cls, path_or_hub_id: str | Path, revision: str | None = None) -> "ChatTokenizer":
        """From a directory or a hub id. Raises WeightsError when there is none, TokenizerError when it won't do."""
        return cls(resolve(path_or_hub_id, revision))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """`encode_chats` of one."""
        return self.encode_chats([messages])[0]

    def encode_chats(self, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Ids of prompts that end where the assistant is to speak, in one call that runs on all cores.

        Raises TokenizerError when the template refuses these roles, and when a content would become control.
        """
        filled = [self._filled(chat) for chat in chats]
        texts = list(dict.fromkeys(part for parts in filled for part in parts if isinstance(part, str)))
        ids = dict(zip(texts, self._encode(texts), strict=True))
        return [
            list(chain.from_iterable(ids[part] if isinstance(part, str) else (part,) for part in parts))
            for parts in filled
        ]

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text. Raises TokenizerError if one of them were control (no known tokenizer does that)."""
        return self._encode([text])[0]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # JSON may hold half of a surrogate pair ("\ud83d"), which has no UTF-8; it becomes "?".
        plain = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        found = [one.ids for one in self._text.encode_batch_fast(plain, add_special_tokens=False)]
        for text, ids in zip(texts, found, strict=True):
            if not self._control_ids.isdisjoint(ids):
                forged = [self._whole.id_to_token(id_) for id_ in ids if id_ in self._control_ids]
                raise TokenizerError(
                    f"{self.directory}: ordinary text became the control token {forged[0]!r}: {text[:80]!r}"
                )
        return found

    def _filled(self, messages: Sequence[Message]) -> list[int | str]:
        """A chat as control tokens' ids and the texts between them."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._pieces:
            self._pieces[roles] = self._render_pieces(roles)
        contents = [m["content"].strip() if m["role"] in self._stripped else m["content"] for m in messages]
        return [
            piece if isinstance(piece, int) else "".join(contents[p] if isinstance(p, int) else p for p in piece)
            for piece in self._pieces[roles]
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """`decode_all` of one."""
        return self.decode_all([tokens])[0]

    def decode_all(self, replies: Sequence[Sequence[int]]) -> list[str]:
        """Text of each reply's ids up to its first end of turn, which is left out; one call that runs on all cores.

        Other control tokens appear as they are written; bytes that are not UTF-8 and ids without a token are U+FFFD.
        """
        runs_of, literals_of = [], []
        for reply in replies:
            ids = np.asarray(reply, np.int64)
            ends = np.flatnonzero(np.isin(ids, self.end_of_turn))
            ids = ids[: ends[0]] if len(ends) else ids
            known = (ids >= 0) & (ids < self.base_vocab)
            odd = np.flatnonzero(~(known & self._ordinary[np.where(known, ids, 0)]))
            runs_of.append([run[i > 0 :].tolist() for i, run in enumerate(np.split(ids, odd))])
            literals_of.append([self._written(int(id_)) for id_ in ids[odd]])
        texts = iter(self._whole.decode_batch([run for runs in runs_of for run in runs], skip_special_tokens=False))
        out = []
        for runs, literals in zip(runs_of, literals_of, strict=True):
            parts = [next(texts) for _ in runs]
            out.append(parts[0] + "".join(map("".join, zip(literals, parts[1:], strict=True))))
        return out

    def _written(self, token: int) -> str:
        """An id that isn't ordinary."""
        return self._whole.id_to_token(token) if token in self._control_ids else UNKNOWN

    def sampleable(self, vocab_size: int) -> np.ndarray:
        """[V] bool: ids with a token, so False for the rows that only pad the embedding.

        Control tokens stay sampleable: forbidding them would change the model's distribution, and a sampled one is
        shown as text and re-enters prompts as text. Raises TokenizerError when ids reach beyond the embedding.
        """
        if self.base_vocab > vocab_size:
            raise TokenizerError(
                f"{self.directory}: the tokenizer's ids go up to {self.base_vocab - 1}, but the model has {vocab_size} "
                f"embeddings; they are not of one checkpoint"
            )
        return np.pad(self._has_token, (0, vocab_size - self.base_vocab))

    def _render(self, messages: Sequence[Message], generation: bool = True) -> str:
        try:
            return self._hf.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation)
        except Exception as error:  # jinja's errors, and whatever a template's expressions raise
            roles = ", ".join(message["role"] for message in messages)
            raise TokenizerError(f"{self.directory}: the chat template refuses ({roles}): {error}") from error

    def _render_pieces(self, roles: tuple[str, ...]) -> list[Piece]:
        """The template over these roles, cut at its control tokens."""
        rendered = self._render([{"role": role, "content": MARK.format(i)} for i, role in enumerate(roles)])
        if sorted(map(int, MARKED.findall(rendered))) != list(range(len(roles))):
            raise TokenizerError(f"{self.directory}: the chat template does not write every content of {roles} once")
        pieces: list[Piece] = []
        start = 0
        for found in self._cut.finditer(rendered):
            pieces += [_split(rendered[start : found.start()]), self._control[found[0]]]
            start = found.end()
        pieces.append(_split(rendered[start:]))
        return [piece for piece in pieces if piece != ()]

    def _check_control(self) -> None:
        """No control token's text may come out as control: then nothing that is written can."""
        for text in self._control:
            self.encode_text(f"{text}a{text}")

    def _check_template(self) -> None:
        """Compare with `transformers` on odd contents; learn which roles' contents the template strips."""
        for role in ("system", "user", "assistant"):
            chat = _chat_with(role)
            if role == "system" and not self._accepts(chat(PROBES[0])):
                continue  # Some templates know no system role; a prompt with one is refused when it comes.
            probes = [chat(text) for text in PROBES]
            if not all(map(self._agrees, probes)):
                self._stripped |= {role}
                for messages in probes:
                    if not self._agrees(messages):
                        raise TokenizerError(
                            f"{self.directory}: the chat template rewrites the contents of {role!r} messages (more "
                            f"than stripping them), or its ids can't be reproduced piece by piece; first difference "
                            f"on {messages!r}. Use a checkpoint whose template writes contents as they are"
                        )

    def _accepts(self, messages: Sequence[Message]) -> bool:
        try:
            self._render(messages)
        except TokenizerError:
            return False
        return True

    def _agrees(self, messages: Sequence[Message]) -> bool:
        expected = self._hf(self._render(messages), add_special_tokens=False)["input_ids"]
        return self.encode_chat(messages) == list(expected)

    def _eos(self) -> list[int]:
        """The ids that the checkpoint's files call end of sequence, in their order."""
        found = [self._hf.eos_token_id]
        for name in ("generation_config.json", "config.json"):
            if (self.directory / name).is_file():
                ids = read_json(self.directory / name).get("eos_token_id")
                found += ids if isinstance(ids, list) else [ids]
                break
        known = [id_ for id_ in found if isinstance(id_, int) and id_ < self.base_vocab and self._has_token[id_]]
        return list(dict.fromkeys(known))

    def _find_end_of_turn(self) -> tuple[int, ...]:
        """The control token that the template writes after an assistant's words, then the files' own.

        They may differ: a base checkpoint can have a chat template and still call only <|endoftext|> its end.
        """
        chat = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": MARK.format(0)}]
        after = self._render(chat, generation=False).partition(MARK.format(0))[2]
        found = self._cut.match(after.lstrip())
        ids = ([self._control[found[0]]] if found else []) + self._eos()
        if not ids:
            raise TokenizerError(f"{self.directory}: no token ends a turn: set eos_token in tokenizer_config.json")
        return tuple(dict.fromkeys(ids))


def pieces(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[str]:
    """What each sampled id adds to the text: [T] strings that join to `decode(tokens)`.

    A character made of several tokens is the last one's, and the others add ""; so does the end of a turn. Each id is
    decoded behind the ones before it, because some tokenizers write a text's first token otherwise; only behind a few,
    so the time grows with T and not with T^2. Text that can't be cut so (some decoders rewrite a whole run of bytes
    when its last is not UTF-8) is the first token's, whole.
    """
    out: list[str] = []
    start, end = 0, 0  # tokens[start:end] are written already and give the next ones their left side
    for index in range(len(tokens)):
        before, now = decode(tokens[start:end]), decode(tokens[start : index + 1])
        if len(now) <= len(before) or (now.endswith(UNKNOWN) and index + 1 < len(tokens)):
            out.append("")
            continue
        out.append(now[len(before) :])
        start, end = end, index + 1
    text = decode(tokens)
    return out if "".join(out) == text else [text, *[""] * (len(tokens) - 1)]


def _without_added_tokens(whole: Tokenizer) -> Tokenizer:
    """The same model and pre-tokenizer, to which "<|im_end|>" is punctuation and letters."""
    plain = Tokenizer(whole.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        setattr(plain, part, getattr(whole, part))
    return plain


def _split(text: str) -> tuple[str | int, ...]:
    """ "user\\n<mark 1>" -> ("user\\n", 1)."""
    parts = MARKED.split(text)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts) if i % 2 or part)


def _chat_with(role: str) -> Callable[[str], list[Message]]:
    """A short chat that ends with the user, in which `role` says the given text."""
    before = {"system": [], "user": [], "assistant": [{"role": "user", "content": "Hi."}]}[role]
    after = [] if role == "user" else [{"role": "user", "content": "Go on."}]
    return lambda text: [*before, {"role": role, "content": text}, *after]
