"""What llamakeep needs of a runtime, and the five kinds of memory a model can have.

A runtime holds sequences of evaluated tokens. The kept state of a sequence has two parts: the
*truncatable* part (dense key and value rows), which can be cut at any token, and the *rolling*
part (a sliding window, a recurrent state), which is true at one position only. Which parts exist
depends on the model's memory family.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from llamakeep.errors import ContextOverflow, InvalidValue
from llamakeep.sampling import Sampling
from llamakeep.states import Checkpoint, DeviceCheckpoint, Positions, Segment
from llamakeep.tokens import IntArray, TokensLike, as_tokens

NO_TOKEN: Final = -1
"""What a sampler returns where its grammar is complete and no token may follow."""


class Family(str, enum.Enum):
    """The kinds of memory that llama.cpp gives a model."""

    ATTENTION = "attention"
    """Dense rows only: cut anywhere, no rolling part."""
    SWA = "swa"
    """Dense and sliding-window layers."""
    RECURRENT = "recurrent"
    """One state per sequence, nothing to cut."""
    HYBRID = "hybrid"
    """Dense rows and a recurrent state."""
    HYBRID_SWA = "hybrid-swa"
    """Sliding-window rows and a recurrent state."""

    @property
    def has_window(self) -> bool:
        """Whether some layers see only a sliding window."""
        return self in (Family.SWA, Family.HYBRID_SWA)

    @property
    def has_recurrent(self) -> bool:
        """Whether part of the state is recurrent."""
        return self in (Family.RECURRENT, Family.HYBRID, Family.HYBRID_SWA)

    @property
    def has_rows(self) -> bool:
        """Whether there is a truncatable part."""
        return self is not Family.RECURRENT


@dataclass(frozen=True, slots=True)
class Traits:
    """How the state of one loaded model can be kept.

    Attributes:
        family: The memory family.
        segments: Ranges of tokens can be read and restored by themselves.
        rolling: A position is restorable only where a checkpoint sits.
        dense: Sliding-window rows are kept in the segments, so no checkpoint is needed.
        n_swa: Size of the sliding window in tokens; 0 without one.
        layout: Digest of the byte layout that the start-up probe found.
        whole_because: Why only whole states are kept ("" when that is not so).
    """

    family: Family
    segments: bool
    rolling: bool
    dense: bool = False
    n_swa: int = 0
    layout: bytes = b""
    whole_because: str = ""

    @property
    def max_segment_tokens(self) -> int | None:
        """The longest segment that keeps what it must, or None for any length."""
        return self.n_swa if self.dense else None


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one sequence gets in a batch.

    Attributes:
        seq_id: The sequence.
        tokens: At least one token, to follow those that the sequence holds.
        output: The logits after the last token are wanted.
    """

    seq_id: int
    tokens: TokensLike
    output: bool = True


class Vocab(Protocol):
    """The tokens of a model, from text and to text.

    Immutable: any thread may use it, also while another one closes the model. Every method raises
    `KeeperClosed` once the model is closed.
    """

    n_vocab: int

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Return the tokens of `text`.

        A model may lack tokens for some letters; they are left out, so there can be none at all.

        Args:
            text: Any text.
            add_special: Add what the model wants around a prompt, such as a token at its begin.
            parse_special: Read the text of special tokens as those, not as plain text.

        Raises:
            InvalidValue: For half of a surrogate pair: such text is no Unicode.
        """
        ...  # pragma: no cover - protocol

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return what a token adds to a text, in UTF-8; it may be a part of a letter.

        Args:
            token: The token.
            special: Special tokens have their text, too; otherwise they are empty.

        Raises:
            TokenError: For a token outside the vocabulary.
        """
        ...  # pragma: no cover - protocol

    def text(self, tokens: TokensLike, *, special: bool = True) -> str:
        """Return the text of tokens. Letters that are cut off are left out.

        Args:
            tokens: The tokens.
            special: The text of special ones is part of it.

        Raises:
            TokenError: For a token outside the vocabulary.
        """
        ...  # pragma: no cover - protocol

    def check_grammar(self, grammar: str) -> None:
        """Raise for a grammar that no answer can be made to follow, and prepare for one that can.

        The first time this may look at each token of the vocabulary. A grammar costs 10 to 500 ms,
        and nothing where it was checked before.

        Raises:
            GrammarError: With what is wrong, and where.
        """
        ...  # pragma: no cover - protocol

    def is_end(self, token: int) -> bool:
        """Whether the model ends an answer with this token.

        Raises:
            TokenError: For a token outside the vocabulary.
        """
        ...  # pragma: no cover - protocol

    @property
    def ends(self) -> frozenset[int]:
        """All tokens that end an answer.

        The first time this may cost a look at each token of the vocabulary; from then on nothing.
        """
        ...  # pragma: no cover - protocol

    @property
    def bos(self) -> int | None:
        """The token at the begin of a text, if the model has one."""
        ...  # pragma: no cover - protocol

    @property
    def eos(self) -> int | None:
        """The token at the end of a text, if the model has one."""
        ...  # pragma: no cover - protocol

    @property
    def adds_bos(self) -> bool:
        """Whether `add_special` puts `bos` before the text."""
        ...  # pragma: no cover - protocol

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that the model's file has for chats, if any."""
        ...  # pragma: no cover - protocol

    @property
    def metadata(self) -> dict[str, str]:
        """What the model's file says about itself; lists, such as the tokens, are not in it."""
        ...  # pragma: no cover - protocol


class Sampler(Protocol):
    """Chooses tokens for one request. For the thread that owns the runtime."""

    def accept(self, tokens: TokensLike) -> None:
        """Count tokens as those before the answer, such as the prompt's, for penalties.

        Raises:
            TokenError: For a token outside the vocabulary; none is counted then.
            KeeperClosed: After `close`.
        """
        ...  # pragma: no cover - protocol

    def sample(self, index: int) -> int:
        """Choose a token by the logits of an output of the last batch, and accept it.

        Args:
            index: What `Runtime.decode` returned for the sequence.

        Returns:
            The token; `NO_TOKEN` where the grammar is complete, and no token that ends an answer
            may be sampled.

        Raises:
            InvalidValue: When this is no output of the last batch.
            GrammarError: When no token goes on as the grammar wants it; the answer ends here.
            DecodeError: When the logits are no numbers: the model, or its file, is broken.
            KeeperClosed: After `close`, or after the runtime's.
        """
        ...  # pragma: no cover - protocol

    def close(self) -> None:
        """Free its memory. Calling it again does nothing; the runtime may be closed before."""
        ...  # pragma: no cover - protocol


class Runtime(Protocol):
    """Sequences of one model's context, and their states as bytes.

    One thread at a time may touch a runtime: its owner. Sequences are numbered from 0; the spare
    sequence that a runtime needs for its own moves is not counted.
    """

    n_ctx: int
    """Tokens that all sequences together have room for."""
    n_batch: int
    """Most tokens evaluated in one native call."""
    n_vocab: int
    n_seqs: int
    traits: Traits
    draft: Runtime | None
    """The context of a draft model that must follow this one, if there is one."""

    def evaluate(self, seq_id: int, tokens: IntArray) -> None:
        """Evaluate `tokens` after those the sequence already holds.

        Raises:
            TokenError: For an id outside the vocabulary; nothing is evaluated.
            ContextOverflow: When the sequence would not fit; nothing is evaluated.
            DecodeError: When the runtime fails; the sequence is cleared.
        """
        ...  # pragma: no cover - protocol

    def decode(self, parts: Sequence[Part]) -> list[int | None]:
        """Evaluate tokens of several sequences in one native call.

        Args:
            parts: Each of another sequence, together at most `n_batch` tokens.

        Returns:
            For each part the index of its output, for `logits_of` and samplers, None where none
            was wanted. Outputs are valid until the next native call.

        Raises:
            InvalidValue: For an empty part, a sequence that comes twice, or too many tokens;
                nothing is evaluated.
            TokenError: For an id outside the vocabulary; nothing is evaluated.
            ContextOverflow: When a sequence would outgrow the context; nothing is evaluated.
            NoRoom: When there are no cells for all of the tokens; no sequence has changed.
            DecodeError: When the runtime fails otherwise; the sequences of the batch are cleared,
                and all others if the error's `cleared_all` says so.
        """
        ...  # pragma: no cover - protocol

    def logits_of(self, index: int) -> npt.NDArray[np.float32]:
        """Return the logits of an output of the last `decode`, shape (n_vocab,), a copy.

        Raises:
            InvalidValue: When this is no output of the last batch.
        """
        ...  # pragma: no cover - protocol

    def sampler(self, sampling: Sampling) -> Sampler:
        """Return a sampler with these settings, for one request.

        Raises:
            InvalidValue: For a number that does not fit into the runtime's types, or a bias that
                forbids every token.
            GrammarError: For a grammar that cannot be followed.
            TokenError: For a bias of a token outside the vocabulary.
            KeeperClosed: When the runtime is closed.
        """
        ...  # pragma: no cover - protocol

    @property
    def vocab(self) -> Vocab:
        """The tokens of the model; for any thread."""
        ...  # pragma: no cover - protocol

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the logits after the last evaluated token, shape (n_vocab,), a copy."""
        ...  # pragma: no cover - protocol

    def positions(self, seq_id: int) -> Positions:
        """Return the first and last position that the sequence holds."""
        ...  # pragma: no cover - protocol

    def segment_bytes(self, n_tokens: int) -> int:
        """Return the exact size of a segment of `n_tokens`, without reading one."""
        ...  # pragma: no cover - protocol

    def read_segment(self, seq_id: int, start: int, end: int) -> Segment:
        """Read the truncatable bytes of tokens [start, end); the sequence is unchanged.

        Costs time and memory in proportion to end - start.

        Raises:
            InvalidValue: For a range that the sequence does not hold.
            StateError: When what came back is not what was asked for.
        """
        ...  # pragma: no cover - protocol

    def checkpoint_bytes(self, seq_id: int) -> int:
        """Return the exact size of a checkpoint of the sequence as it is now.

        Raises:
            InvalidValue: For an empty sequence, or a family that has no rolling part.
        """
        ...  # pragma: no cover - protocol

    def read_checkpoint(self, seq_id: int) -> Checkpoint:
        """Read the rolling bytes at the sequence's end; the sequence is unchanged.

        Raises:
            InvalidValue: For an empty sequence, or a family that has no rolling part.
            StateError: When what came back is not what was asked for.
        """
        ...  # pragma: no cover - protocol

    def read_device_checkpoint(self, seq_id: int) -> DeviceCheckpoint:
        """Like `read_checkpoint`, with the tensors left on the device.

        Ends the life of the sequence's previous device checkpoint.

        Raises:
            InvalidValue: As `read_checkpoint`; also for whole states and for families with a
                window, which llama.cpp cannot leave on the device.
            StateError: When what came back is not what was asked for.
        """
        ...  # pragma: no cover - protocol

    def restore(
        self,
        seq_id: int,
        n_tokens: int,
        segments: Iterable[Segment],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Make the sequence hold exactly the first `n_tokens` of a prompt.

        Args:
            seq_id: The sequence; what it held before is gone.
            n_tokens: Tokens it shall hold.
            segments: In order, together covering [0, n_tokens); each is used up to the start of
                the next one, the last one up to `n_tokens`. A sequence is checked as a whole
                before anything is moved; an iterator is drawn one ahead of what is moved.
            checkpoint: At `n_tokens`, where the family needs one; applied last.

        Raises:
            StateRejected: When a state is not what it should be; found before native code sees it.
                The sequence is unchanged, or empty when the states came from an iterator.
            StateError: What the iterator raises. The sequence is empty.
            RestoreFailed: When the runtime refused, or size or positions were wrong afterwards.
                The sequence is empty.
        """
        ...  # pragma: no cover - protocol

    def can_rewind(self, seq_id: int, n_tokens: int) -> bool:
        """Whether `rewind` to `n_tokens` works without a checkpoint."""
        ...  # pragma: no cover - protocol

    def rewind(
        self,
        seq_id: int,
        n_tokens: int,
        checkpoint: Checkpoint | DeviceCheckpoint | None = None,
    ) -> None:
        """Cut the live sequence back to its first `n_tokens`, in place.

        Raises:
            InvalidValue: When the sequence holds fewer tokens; it is unchanged.
            StateRejected: When the checkpoint is not one of this position, or is stale; the
                sequence is unchanged.
            RestoreFailed: When the runtime refused; the sequence is empty.
        """
        ...  # pragma: no cover - protocol

    def copy(self, src: int, dst: int, n_tokens: int, checkpoint: Checkpoint | None = None) -> None:
        """Make `dst` hold the first `n_tokens` of `src`, which is unchanged.

        Families with a rolling part need the checkpoint at `n_tokens`, unless it is the end of
        `src`.

        Raises:
            InvalidValue: When `src` holds fewer tokens or a checkpoint is missing.
            StateRejected: When the checkpoint is not one of this position; `dst` is unchanged.
            RestoreFailed: When the runtime refused; `dst` is empty.
        """
        ...  # pragma: no cover - protocol

    def clear(self, seq_id: int) -> None:
        """Empty the sequence; its memory is free afterwards."""
        ...  # pragma: no cover - protocol

    def clear_all(self) -> None:
        """Empty every sequence."""
        ...  # pragma: no cover - protocol

    def close(self) -> None:
        """Free what the runtime owns. Calling it again does nothing."""
        ...  # pragma: no cover - protocol


def check_parts(runtime: Runtime, parts: Sequence[Part]) -> list[tuple[IntArray, Positions]]:
    """Return the tokens of each part, and what its sequence holds; `Runtime.decode` says what fits.

    Raises:
        InvalidValue: As `Runtime.decode` does.
        TokenError: So, too.
        ContextOverflow: So, too.
    """
    found, seen, n_tokens = [], set(), 0
    for part in parts:
        held = runtime.positions(part.seq_id)
        tokens = as_tokens(part.tokens, n_vocab=runtime.n_vocab)
        if part.seq_id in seen:
            raise InvalidValue(f"sequence {part.seq_id} is twice in a batch")
        if not tokens.size:
            raise InvalidValue(f"no tokens for sequence {part.seq_id}")
        check_fits(held.n_tokens + tokens.size, runtime.n_ctx)
        n_tokens += tokens.size
        seen.add(part.seq_id)
        found.append((tokens, held))
    if n_tokens > runtime.n_batch:
        raise InvalidValue(f"{n_tokens} tokens exceed a batch of {runtime.n_batch}")
    return found


def check_fits(n_tokens: int, n_ctx: int) -> None:
    """Raise when one sequence is to hold more than the context has room for.

    Raises:
        ContextOverflow: With both numbers.
    """
    if n_tokens > n_ctx:
        raise ContextOverflow(f"{n_tokens} tokens exceed the context of {n_ctx}")


def spoils_others(family: Family, parts: Sequence[Part]) -> bool:
    """Whether a batch that fails while it is computed spoils sequences that are not in it.

    To lay the recurrent states of a batch side by side, llama.cpp swaps them with those that lie
    there. The swap is noted before the graph that carries it out, and is not taken back.
    """
    return family.has_recurrent and len(parts) > 1


def utf8(text: str) -> bytes:
    """Return a text as UTF-8.

    Raises:
        InvalidValue: For half of a surrogate pair, with where it stands.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(
            f"half of a surrogate pair at letter {error.start} of a text: no Unicode"
        ) from None
