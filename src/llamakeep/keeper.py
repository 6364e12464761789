"""`attach`: a `llama_cpp.Llama` that never evaluates a prefix twice.

The keeper stands in front of the methods through which a `Llama` changes its context (`generate`,
`eval`, `reset`, `load_state` and the two that create completions). It keeps its own log of the
tokens whose rows are in the context, so it knows what is live; before a prompt is evaluated it
brings the context to the deepest position that can be reached without evaluating, while the prompt
is evaluated it takes checkpoints, and afterwards it saves what the tree lacks.
"""

from __future__ import annotations

import inspect
import logging
import math
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from llamakeep import fingerprint
from llamakeep.chat import find_starts, user_delimiter
from llamakeep.errors import (
    ContextOverflow,
    DecodeError,
    InvalidValue,
    KeeperBusy,
    KeeperClosed,
    whole_number,
)
from llamakeep.explain import Explanation, History, Served, kept_elsewhere
from llamakeep.fingerprint import Difference, Namespace, read_adapters
from llamakeep.modelfile import inspect_file
from llamakeep.modes import Mode, current_mode
from llamakeep.policy import DEFAULT_POLICY, Policy, get_policy, name_of
from llamakeep.sequence import FIRST_TIME, KeptSequence
from llamakeep.states import Reuse
from llamakeep.tiers import TierSettings
from llamakeep.tokens import IntArray, as_tokens, common_prefix
from llamakeep.tree import PrefixTree
from llamakeep.turns import OpenStream, Turns

if TYPE_CHECKING:
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

logger = logging.getLogger("llamakeep")

_HOOKED = (
    "create_chat_completion",
    "create_completion",
    "eval",
    "generate",
    "load_state",
    "reset",
)
_HOOKED_IN_CONTEXT = ("kv_cache_clear", "kv_cache_seq_rm")
_DRAIN_S = 10.0
FREE_MEMORY_SHARE = 0.25
"""Share of the memory that is free when a keeper is made that it may fill by default."""


def default_capacity_bytes() -> int:
    """Return a quarter of the memory that is available now."""
    return int(psutil.virtual_memory().available * FREE_MEMORY_SHARE)


class Keeper:
    """Keeps what a `llama_cpp.Llama` computes. Made by `attach`; see there.

    The keeper does not keep the `Llama` alive: when the program drops it, memory is freed as
    without a keeper.

    Attributes:
        last: How the last prompt was served, or None before the first.
        on_progress: Called with (tokens evaluated, tokens to evaluate) before a prompt is
            evaluated and after each batch of `n_batch`; None for no calls. What it raises ends the
            call, and reaches the caller as it is.
    """

    def __init__(
        self,
        llm: Any,
        runtime: LlamaCppRuntime,
        tree: PrefixTree,
        namespace: Namespace,
        sequence: KeptSequence,
        cache_dir: Path | None = None,
    ) -> None:
        self.last: Reuse | None = None
        self.on_progress: Callable[[int, int], None] | None = None
        self._llm = weakref.ref(llm)
        self._runtime = runtime
        self._tree = tree
        self._sequence = sequence
        self._cache_dir = cache_dir
        self._introduced: set[bytes] = set()
        self._use_namespace(namespace)
        self._context = llm._ctx
        self._turns = Turns()
        self._prompt_end = 0
        self._served: Reuse | None = None  # by the call that runs now
        self._need_scores = False
        self._in_chat = False
        self._mode = Mode.ON  # of the call that runs now
        self._run_now: object | None = None  # the prompt that is being answered
        self._lost: IntArray | None = None  # tokens whose rows were removed past the Llama
        self._delimiters: dict[str, IntArray] = {}
        self._warned_cache = False
        self._attached = True
        self._totals = {"requests": 0, "reused_tokens": 0, "evaluated_tokens": 0}
        self._history = History(
            policy=name_of(tree.policy) if tree.store.capacity_bytes else "",
            rolling=runtime.traits.rolling,
            align=sequence.align,
        )
        history, exact = self._history, runtime.traits.rolling
        tree.on_evicted = lambda namespace, tokens: history.evicted(namespace, tokens, exact)

    def __repr__(self) -> str:
        state = "" if self._attached else " detached"
        return f"<Keeper{state} {self._tree!r}>"

    # -- for the user ------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes: JSON-ready, keys as everywhere in llamakeep.

        From any thread, also while a call runs; costs nothing that grows with what is kept.
        `requests`, `reused_tokens` and `evaluated_tokens` count prompts and their tokens;
        `saved_share` is the share of prompt tokens, 0 to 1, that were not evaluated. `used_bytes`
        of `capacity_bytes` are kept in `blobs` that hang on `nodes`; `device_bytes` are in buffers
        of the context, estimated and not counted against the capacity; `live_tokens` are in the
        context. `hits` and `misses` are requests that did and did not find a state; `evicted_*`
        and `refused_*` are what went and what did not fit, `lost_blobs` what was gone or refused
        on use, `failures` what went wrong and was survived, by kind. `whole_because` says why a
        model's states are kept whole, or nothing. `below` tells of the tiers below memory, and of
        what is on its way there.
        """
        totals = self._totals
        prompt_tokens = totals["reused_tokens"] + totals["evaluated_tokens"]
        traits, tree = self._runtime.traits, self._tree
        return {
            **totals,
            "saved_share": totals["reused_tokens"] / prompt_tokens if prompt_tokens else 0.0,
            "used_bytes": tree.store.used_bytes,
            "capacity_bytes": tree.store.capacity_bytes,
            "device_bytes": self._sequence.device_bytes,
            "blobs": len(tree.store.memory),
            "nodes": len(tree),
            "live_tokens": self._sequence.live.n_tokens,
            "family": traits.family.value,
            "whole_because": traits.whole_because,
            "policy": name_of(tree.policy),
            "failures": dict(self._sequence.failures),
            **asdict(tree.counters),
            "below": tree.store.stats(),
        }

    def explain(self, request: int | None = None) -> Explanation | None:
        """Say why the rest of a prompt was evaluated; None for a request that is forgotten.

        The last 100 prompts are remembered, while the keeper lives and is not cleared. From any
        thread; costs some milliseconds for a long prompt.

        Args:
            request: Number of a request, the first one being 1; the last one if None.
        """
        served = self._history.find(request)
        if served is None:
            return None
        vocab = self._runtime.vocab if self._attached else None
        return self._history.explain(served, vocab, salts=True)

    def entries(self) -> list[dict[str, Any]]:
        """Return every kept prompt, most recently used first: JSON-ready.

        Each has `n_tokens`, `path_bytes` (what it shares with others included), the positions of
        its `checkpoints`, `hits`, `last_used` (seconds of `time.monotonic`) and `tier`, the lowest
        that a part of it is in. What is below memory and was not asked for is not among them.

        Raises:
            KeeperBusy: While a stream is open in this thread.
            KeeperClosed: When the keeper is detached or its model closed.
        """
        with self._turn(own=True):
            return [asdict(entry) for entry in self._tree.entries()]

    def clear(self) -> None:
        """Forget every kept state, on disk too, and what is live in the context.

        Of what is on disk, that of this model, these settings and this tenant. A shared tier keeps
        what it has until it expires: others use it.

        Raises:
            KeeperBusy: While a stream is open in this thread.
            KeeperClosed: When the keeper is detached or its model closed.
        """
        with self._turn(own=True) as llm:
            self._tree.clear()
            self._history.clear()
            self._clear_context(llm)
            self._tree.store.forget_namespaces(list(self._introduced))()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything that is kept is in the tiers below memory too.

        Args:
            timeout: Seconds; None for as long as it takes.

        Returns:
            Whether all of them have it. What a tier refuses, because it is full or out of reach,
            is counted in `stats()["below"]`.

        Raises:
            KeeperBusy: While a stream is open in this thread.
            KeeperClosed: When the keeper is detached or its model closed.
        """
        with self._turn(own=True):
            return self._tree.store.flush(timeout)

    def check(self) -> None:
        """Prove that what is counted is what is kept. Costs a visit of every node.

        Raises:
            IntegrityError: With the numbers.
        """
        with self._turn(own=True):
            self._tree.check()

    def set_lora(
        self, adapters: Mapping[str | Path, float] | Sequence[tuple[str | Path, float]] = ()
    ) -> None:
        """Use these LoRA adapters, with these scales, instead of those before.

        What was computed under other adapters or scales is not used, and is there again when they
        come back.

        Args:
            adapters: Paths and scales; none for the bare model.

        Raises:
            InvalidValue: For a scale that is no finite number, or one file with two scales.
            ModelError: When one cannot be loaded; the adapters before stay in force.
            KeeperBusy: While a stream is open in this thread.
            KeeperClosed: When the keeper is detached or its model closed.
        """
        pairs = _adapter_pairs(adapters)
        with self._turn(own=True) as llm:
            kept = read_adapters(pairs, cache_dir=self._cache_dir)
            loaded = [(self._runtime.load_adapter(path), scale) for path, scale in pairs]
            namespace = replace(self._namespace, adapters=kept)
            self._clear_context(llm)
            self._runtime.set_adapters(loaded)
            self._use_namespace(namespace)

    def _use_namespace(self, namespace: Namespace) -> None:
        """Keep and find what belongs to `namespace` from now on."""
        self._namespace, self._sequence.namespace = namespace, namespace.digest
        self._introduced.add(namespace.digest)
        self._tree.store.introduce(namespace.digest, namespace.describe())

    def detach(self) -> None:
        """Give the `Llama` its own methods back and free what was kept. Again: does nothing.

        What is on its way to a tier below is written first, for at most ten seconds; what is there
        stays. The `Llama` stays usable, with what is live in its context.

        Raises:
            KeeperBusy: While a stream is open in this thread.
        """
        if not self._attached:
            return
        self._turns.begin()
        try:
            llm = self._llm()
            for name in _HOOKED if llm is not None else ():
                vars(llm).pop(name, None)
            self._free()
        finally:
            self._turns.end()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # -- turns -------------------------------------------------------------------------------

    def _model(self) -> Any:
        llm = self._llm()
        if llm is None or llm._ctx is None or llm._ctx.ctx is None:
            raise KeeperClosed("the model is closed")
        if not self._attached:
            raise KeeperClosed("the keeper is detached")
        return llm

    @contextmanager
    def _turn(self, *, own: bool = False) -> Iterator[Any]:
        """Run inside a turn, our own or the one we are called in; yields the model."""
        if self._turns.nested and not own:
            yield self._model()
            return
        self._turns.begin()
        try:
            llm = self._model()
            with self._cache_set_aside(llm):
                yield llm
        finally:
            self._turns.end()

    @contextmanager
    def _cache_set_aside(self, llm: Any) -> Iterator[None]:
        """Keep `llm.cache` out of a call: it would load whole states over what we restored."""
        cache, llm.cache = llm.cache, None
        if cache is not None and not self._warned_cache:
            self._warned_cache = True
            logger.warning(
                "%s is set on a model that has a keeper, which does its work: it is not used",
                type(cache).__name__,
            )
        try:
            yield
        finally:
            if llm.cache is None:
                llm.cache = cache

    def _open(self, start: Callable[[Any], Any]) -> Any:
        """Run a call on the model that may return a stream, which then keeps the turn."""
        if self._turns.nested:
            if self._run_now is not None:
                raise KeeperBusy("a prompt is being answered, and this call comes from inside that")
            return start(self._model())
        begun = False
        try:
            self._turns.begin()
            begun = True
            llm = self._model()
            self._served, self._mode = None, current_mode()
            with self._cache_set_aside(llm):
                result = start(llm)
            if isinstance(result, Generator):
                self._turns.suspend()
                aside = partial(self._cache_set_aside, llm)
                return OpenStream(self._turns, result, aside, self._finish_call)
        except BaseException:
            if begun:
                self._finish_call()
                self._turns.end()
            raise
        self._finish_call()
        self._turns.end()
        return result

    def _finish_call(self) -> None:
        self._need_scores = self._in_chat = False
        self._run_now = None

    def _closed(self) -> None:
        """The model is being closed: wait for another thread's call, then free what is kept."""
        try:
            self._turns.begin()
        except KeeperBusy:
            self._free()  # closed from inside our own call or stream
        else:
            self._free()
            self._turns.end()

    def _free(self) -> None:
        self._attached = False
        for name in _HOOKED_IN_CONTEXT:
            vars(self._context).pop(name, None)
        self._runtime.close()
        self._tree.store.close(_DRAIN_S)
        self._tree.clear()

    # -- the hooked methods ------------------------------------------------------------------

    def _hook(self, llm: Any) -> None:
        for name in _HOOKED:
            setattr(llm, name, getattr(self, f"_{name}"))
        for name in _HOOKED_IN_CONTEXT:
            setattr(llm._ctx, name, getattr(self, f"_{name}"))
        # The model must not keep a keeper alive that was detached.
        llm._stack.callback(_close, weakref.ref(self))

    def _create_completion(self, *args: Any, **kwargs: Any) -> Any:
        def start(llm: Any) -> Any:
            bound = inspect.signature(type(llm).create_completion).bind(llm, *args, **kwargs)
            wanted = bound.arguments
            self._need_scores = bool(wanted.get("echo")) and wanted.get("logprobs") is not None
            return self._annotated(type(llm).create_completion(*bound.args, **bound.kwargs))

        return self._open(start)

    def _create_chat_completion(self, *args: Any, **kwargs: Any) -> Any:
        def start(llm: Any) -> Any:
            self._in_chat = True
            return self._annotated(type(llm).create_chat_completion(llm, *args, **kwargs))

        return self._open(start)

    def _annotated(self, result: Any) -> Any:
        """Add the reused tokens to the usage of a response, or of a stream's chunks."""
        if isinstance(result, Iterator):
            return self._annotated_stream(result)
        self._annotate(result)
        return result

    def _annotated_stream(self, chunks: Iterator[Any]) -> Generator[Any, None, None]:
        try:
            for chunk in chunks:
                self._annotate(chunk)
                yield chunk
        finally:
            if isinstance(chunks, Generator):
                chunks.close()

    def _annotate(self, response: Any) -> None:
        usage = response.get("usage") if isinstance(response, dict) else None
        if usage and self._served is not None:
            cached = {"cached_tokens": self._served.reused_tokens}
            usage.setdefault("prompt_tokens_details", cached)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        def start(llm: Any) -> Any:
            bound = inspect.signature(type(llm).generate).bind(llm, *args, **kwargs)
            options = dict(bound.arguments)
            del options["self"]
            tokens, fresh = options.pop("tokens"), options.pop("reset", True)
            if fresh and self._continues_opaque(llm, tokens):
                # Where the pictures are, the token buffer holds whatever was there before.
                return self._run(llm, np.empty(0, np.int32), False, options)
            prompt = as_tokens(tokens, n_vocab=self._runtime.n_vocab)
            if fresh and not prompt.size:
                raise InvalidValue("an empty prompt has nothing to continue from")
            return self._run(llm, prompt, fresh, options)

        return self._open(start)

    def _run(
        self, llm: Any, prompt: IntArray, fresh: bool, options: dict[str, Any]
    ) -> Generator[int, Any, None]:
        n_before = 0 if fresh else llm.n_tokens
        if n_before + prompt.size > self._runtime.n_ctx:
            raise ContextOverflow(
                f"{n_before + prompt.size} tokens exceed the context of {self._runtime.n_ctx}"
            )
        follow, rest = prompt, prompt
        if fresh:
            rest = prompt[self._resume(llm, prompt) :]
        else:
            self._sync(llm)
            self._sequence.due, self._sequence.mode = [], self._mode
            follow = np.concatenate((self._sequence.live.tokens, prompt))
            if self._sequence.live.opaque:
                self._note(Reuse(0, n_before, "none", "filled by its caller, with more than text"))
            else:
                self._note(Reuse(n_before, prompt.size, "live", "continued by its caller"))
        accepted: list[int] = []
        self._prompt_end = llm.n_tokens + rest.size
        run = self._run_now = object()
        inner = type(llm).generate(llm, rest.tolist(), reset=False, **options)
        try:
            sent = None
            while True:
                try:
                    token = inner.send(sent)
                except StopIteration:
                    return
                accepted.append(token)
                sent = yield token
                if sent is not None:
                    accepted.extend(sent)
        finally:
            inner.close()
            # A generator that outlived its call must not touch what is another's by now.
            if self._run_now is run and self._turns.nested:
                self._run_now = None
                self._sequence.due = []
                self._save(llm, np.concatenate((follow, as_tokens(accepted))))

    def _eval(self, tokens: Sequence[int]) -> None:
        array = as_tokens(tokens, n_vocab=self._runtime.n_vocab)
        with self._turn() as llm:
            self._sync(llm)
            end = llm.n_tokens + array.size
            if end > self._runtime.n_ctx:
                raise ContextOverflow(f"{end} tokens exceed the context of {self._runtime.n_ctx}")
            self._evaluate(llm, array)

    def _evaluate(self, llm: Any, tokens: IntArray) -> None:
        """Evaluate in the batches that `Llama.eval` would make, cut where a checkpoint is due."""
        if not tokens.size:
            type(llm).eval(llm, [])
            return
        at, start = 0, self._sequence.live.n_tokens
        report = self.on_progress if llm.n_tokens + tokens.size <= self._prompt_end else None
        try:
            if report is not None:
                report(0, tokens.size)
            for cut in self._sequence.cuts(tokens.size):
                while at < cut - start:
                    part = tokens[at : min(cut - start, at + llm.n_batch)]
                    self._evaluate_batch(llm, part)
                    at += part.size
                    if report is not None:
                        report(at, tokens.size)
        except BaseException:
            # Part of a batch may be in the context, or a recurrent state half advanced.
            self._clear_context(llm)
            raise

    def _evaluate_batch(self, llm: Any, tokens: IntArray) -> None:
        at = llm.n_tokens
        try:
            type(llm).eval(llm, tokens.tolist())
        except RuntimeError as error:
            raise DecodeError(f"{error} for {tokens.size} tokens at {at}") from error
        self._sequence.note_evaluated(tokens, scored=llm._logits_all)

    def _reset(self) -> None:
        with self._turn() as llm:
            type(llm).reset(llm)
            self._sequence.cut(0)
            self._lost = None

    def _kv_cache_clear(self) -> None:
        self._lose(0)
        type(self._context).kv_cache_clear(self._context)

    def _kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        live, p0 = self._sequence.live, max(p0, 0)
        removed: bool = type(self._context).kv_cache_seq_rm(self._context, seq_id, p0, p1)
        if not removed:
            return False  # a recurrent state cannot be cut: nothing changed
        if 0 <= p1 < live.n_tokens:
            self._sequence.cut(min(p0, live.n_tokens))  # a hole: what is behind it may be moved
        else:
            self._lose(p0)
        return True

    def _lose(self, n_tokens: int) -> None:
        """Rows past `n_tokens` go without the `Llama` knowing: it may count on them later."""
        live = self._sequence.live
        if n_tokens < live.n_tokens:
            self._lost = live.tokens.copy() if self._lost is None else self._lost
            self._sequence.cut(n_tokens)

    def _load_state(self, state: Any) -> None:
        with self._turn() as llm:
            try:
                type(llm).load_state(llm, state)
            except BaseException:
                self._clear_context(llm)
                raise
            # Its tokens are what the state claims, its rows are unknown to us.
            self._sequence.cut(0)
            self._sequence.live.opaque, self._lost = True, None

    # -- between the Llama and its sequence --------------------------------------------------

    def _clear_context(self, llm: Any) -> None:
        self._sequence.clear()
        self._tell(llm)

    def _tell(self, llm: Any) -> None:
        """Tell the `Llama` what its context holds now."""
        tokens = self._sequence.live.tokens
        llm.input_ids[: tokens.size] = tokens
        llm.n_tokens = int(tokens.size)
        llm._requires_eval = True
        self._lost = None

    def _notice(self, llm: Any) -> None:
        """Take note of what changed behind our back. Evaluates nothing."""
        live, lost = self._sequence.live, self._lost
        known = lost is not None and live.n_tokens < llm.n_tokens <= lost.size
        if known and self._runtime.positions(0).n_tokens <= live.n_tokens:
            return  # tokens whose rows are gone: `_sync` computes them again
        self._lost = None
        if llm.n_tokens > live.n_tokens:
            live.opaque = True
        elif llm.n_tokens < live.n_tokens or live.opaque:
            self._sequence.cut(llm.n_tokens)

    def _sync(self, llm: Any) -> None:
        """Make the context hold exactly what `Llama` counts, before something is added to it."""
        self._notice(llm)
        live = self._sequence.live
        held = self._runtime.positions(0).n_tokens
        tokens = live.tokens if self._lost is None else self._lost[: llm.n_tokens]
        if live.opaque or held == tokens.size:
            return
        if held > tokens.size and self._runtime.can_rewind(0, tokens.size):
            return  # `Llama.eval` cuts rows past its own count before it evaluates
        # A recurrent state cannot be cut, and rows that are gone are gone: compute them again.
        tokens, due = tokens.copy(), self._sequence.due
        self._sequence.due = []
        reached = self._sequence.reach(tokens, limit=tokens.size)
        self._tell(llm)
        self._evaluate(llm, tokens[reached.n_tokens :])
        self._sequence.due = due

    def _continues_opaque(self, llm: Any, tokens: Sequence[int]) -> bool:
        """Whether a chat handler of this very call filled the context that it now continues."""
        self._notice(llm)
        return (
            self._sequence.live.opaque
            and self._in_chat
            and llm.n_tokens == len(tokens)
            and np.array_equal(llm.input_ids[: len(tokens)], tokens)
        )

    def _resume(self, llm: Any, prompt: IntArray) -> int:
        """Bring the context to the deepest reachable prefix of `prompt`; return its length."""
        rolling = self._runtime.traits.rolling and self._in_chat
        self._history.extend(self._sequence.live.tokens)
        reuse = self._sequence.resume(
            prompt,
            user_starts=find_starts(prompt, self._delimiter(llm)) if rolling else (),
            scored=self._need_scores,
            mode=self._mode,
        )
        self._tell(llm)
        elsewhere: tuple[Difference, ...] = ()
        if reuse.reason == FIRST_TIME:
            namespace, below = self._namespace, self._tree.store.below
            elsewhere = kept_elsewhere(below, namespace.digest, namespace.describe(), prompt)
            reuse = replace(
                reuse, reason=fingerprint.explain(elsewhere) if elsewhere else FIRST_TIME
            )
        self._note(reuse)
        self._remember(prompt, reuse, elsewhere)
        return reuse.reused_tokens

    def _remember(self, prompt: IntArray, reuse: Reuse, elsewhere: tuple[Difference, ...]) -> None:
        """Note a request to be explained, with its tokens only if they may be kept."""
        keeps, now = self._mode.writes, self._history.now()
        self._history.add(
            Served(
                id=self._totals["requests"],
                label="",
                namespace=self._namespace.digest,
                tokens=prompt.copy() if keeps else prompt[:0].copy(),
                n_prompt=int(prompt.size),
                reuse=reuse,
                keeps=keeps,
                reads=self._mode.reads,
                elsewhere=elsewhere,
                resumed_s=now,
                ended_s=now,
            )
        )

    def _note(self, reuse: Reuse) -> None:
        self.last = self._served = reuse
        self._totals["requests"] += 1
        self._totals["reused_tokens"] += reuse.reused_tokens
        self._totals["evaluated_tokens"] += reuse.evaluated_tokens

    def _delimiter(self, llm: Any) -> IntArray:
        """Return what stands before a user message in this chat format, found once for each."""
        if llm.chat_handler is not None:
            return np.empty(0, np.int32)  # it may load a picture model, or evaluate
        handler = llm._chat_handlers.get(llm.chat_format)
        if handler is None:
            handler = self._runtime.chat_handler(llm.chat_format)
        if llm.chat_format not in self._delimiters:
            self._delimiters[llm.chat_format] = user_delimiter(llm, handler)
        return self._delimiters[llm.chat_format]

    def _save(self, llm: Any, accepted: IntArray) -> None:
        """Keep the rows of `accepted`, as far as they are in the context and were accepted."""
        if not self._attached or llm._ctx.ctx is None:
            return
        self._notice(llm)
        n_tokens = common_prefix(self._sequence.live.tokens, accepted)
        try:
            if self._sequence.drop_past(n_tokens):
                self._tell(llm)
            self._sequence.save(n_tokens)
        except Exception:  # the answer is there already: a policy that raises must not undo it
            self._sequence.count_failure("save")
            logger.exception("what was evaluated could not be kept")


def _close(keeper: weakref.ref[Keeper]) -> None:
    alive = keeper()
    if alive is not None and alive._attached:
        alive._closed()


def has_keeper(context: Any) -> bool:
    """Whether a keeper is attached to the `Llama` that a `LlamaContext` is of."""
    hook = getattr(context, _HOOKED_IN_CONTEXT[0], None)
    return isinstance(getattr(hook, "__self__", None), Keeper)


def _adapter_pairs(adapters: object) -> list[tuple[str | Path, float]]:
    """Return adapters as pairs of path and scale.

    Raises:
        InvalidValue: For another form, or a scale that is no finite number.
    """
    given = list(adapters.items()) if isinstance(adapters, Mapping) else adapters
    if isinstance(given, (str, Path)) or not isinstance(given, Sequence):
        raise InvalidValue(f'adapters are given like {{"style.gguf": 0.8}}, not {adapters!r}')
    pairs = []
    for item in given:
        if isinstance(item, (str, Path)) or len(item) != 2:
            raise InvalidValue(f'an adapter is given like ("style.gguf", 0.8), not {item!r}')
        path, scale = item
        if not isinstance(scale, (int, float)) or not math.isfinite(scale):
            raise InvalidValue(f"the scale of {path} must be a finite number, not {scale!r}")
        pairs.append((path, float(scale)))
    return pairs


def attach(
    llm: Any,
    *,
    capacity_bytes: int | None = None,
    segment_tokens: int = 256,
    min_step: int = 512,
    align: int = 8,
    ctx_checkpoints: int = 32,
    checkpoint_on_device: bool = False,
    policy: str | Policy = DEFAULT_POLICY,
    cache_dir: str | Path | None = None,
    disk_bytes: int | None = None,
    redis_url: str | None = None,
    redis_prefix: str | None = None,
    secret: str | None = None,
    salt: str | None = None,
    allow_unauthenticated: bool = False,
    second_sighting: bool = False,
    min_tokens: int = 0,
) -> Keeper:
    """Keep what a `llama_cpp.Llama` computes, so that no prefix is evaluated twice.

    From now on every call of `llm` (completions, chats, streams, tools, grammars) resumes at the
    deepest position that is live or kept, and keeps what it adds. The `Llama` gets a new context
    with one spare sequence; what it had evaluated before is gone.

    Args:
        llm: The model; any family that has a memory.
        capacity_bytes: Limit on the bytes of kept states; None for a quarter of the memory that
            is free now.
        segment_tokens: Longest span that is kept as one piece.
        min_step: Least distance in tokens between checkpoints at user messages.
        align: Prompts are resumed at multiples of this, so that rows are computed in the same
            groups as without a keeper; 1 turns that off.
        ctx_checkpoints: Most checkpoints along one prompt (families with a rolling part); 0 takes
            none.
        checkpoint_on_device: Leave the newest checkpoint of the live conversation in buffers of
            the context instead of copying it to the host. It serves rewinding that conversation
            and is not kept when another one takes its place.
        policy: What goes first when the capacity is reached: a name that `policy_names` lists, or
            an object with a `rank` method, see `policy/`. `hazard` begins as `lru` and learns from
            how long states wait to be used again. On disk it is `lru`.
        cache_dir: Directory of the disk tier, where states survive this process; several may use
            it at once. None for that of `LLAMAKEEP_CACHE_DIR`, or no disk tier.
        disk_bytes: Limit on the disk tier's bytes; None for that of `LLAMAKEEP_DISK_BYTES`, or a
            quarter of what is free there.
        redis_url: Server of a tier that machines share, see `RedisStore`; None for that of
            `LLAMAKEEP_REDIS_URL`, or no shared tier.
        redis_prefix: Begins all keys there; only those with the same share. None for that of
            `LLAMAKEEP_REDIS_PREFIX`, or `llamakeep`.
        secret: Seals every state that leaves this process: one that was made without it is not
            used. A shared tier needs it. None for that of `LLAMAKEEP_SECRET`. It does not encrypt.
        salt: Tenants with different salts share nothing. None for that of `LLAMAKEEP_SALT`.
        allow_unauthenticated: Use a shared tier without a secret: whoever can write to the server
            can then hand forged states to llama.cpp.
        second_sighting: States go to disk and the shared tier only when a second prompt has used
            them.
        min_tokens: States of shorter prompts do not go there.

    Returns:
        The keeper: `last`, `stats`, `clear`, `set_lora`, `flush`, `detach`.

    Raises:
        InvalidValue: For a value that cannot be meant, with its name. Also when `llm` has a
            keeper already.
        StoreError: For a directory that cannot be used, with the reason.
        ModelError: For a closed, embedding or encoder model, with the reason.

    Changes `llm`'s methods until `detach`. Costs a new context and the evaluation of some forty
    tokens, which prove that this model's states can be kept.
    """
    for name, value, least in (
        ("segment_tokens", segment_tokens, 1),
        ("min_step", min_step, 0),
        ("align", align, 1),
        ("ctx_checkpoints", ctx_checkpoints, 0),
        ("capacity_bytes", 0 if capacity_bytes is None else capacity_bytes, 0),
    ):
        whole_number(name, value, least)
    get_policy(policy)
    from llamakeep.runtime.llama_borrowed import refuse_unfit
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime, check_gguf

    refuse_unfit(llm)
    if "generate" in vars(llm):
        raise InvalidValue("this model has a keeper already: detach that first")
    check_gguf(llm.model_path)
    settings = TierSettings.resolve(
        cache_dir=cache_dir,
        disk_bytes=disk_bytes,
        redis_url=redis_url,
        redis_prefix=redis_prefix,
        secret=secret,
        salt=salt,
        allow_unauthenticated=allow_unauthenticated,
        second_sighting=second_sighting,
        min_tokens=min_tokens,
    )
    adapters = [(llm.lora_path, llm.lora_scale)] if llm.lora_path else []
    with ExitStack() as undo:
        capacity = default_capacity_bytes() if capacity_bytes is None else capacity_bytes
        store = settings.open(capacity, policy=policy)
        undo.callback(store.close, 0.0)
        model = inspect_file(llm.model_path, cache_dir=settings.cache_dir)
        kept_adapters = read_adapters(adapters, cache_dir=settings.cache_dir)
        runtime = LlamaCppRuntime.adopt(llm, segment_tokens=segment_tokens)
        undo.callback(runtime.close)
        longest = min(segment_tokens, runtime.n_ctx)
        needed = runtime.segment_bytes(longest) if runtime.traits.segments else 0
        if capacity < needed and not store.below:
            raise InvalidValue(
                f"capacity_bytes={capacity:,} is below one segment of {longest} tokens ({needed:,} "
                "bytes): raise it, or lower segment_tokens"
            )
        namespace = settings.namespace(
            runtime.traits,
            model.fingerprint,
            model_name=Path(llm.model_path).name,
            segment_tokens=segment_tokens,
            context=runtime.context_settings(llm, rope_factors=model.rope_factors),
            build=runtime.build_facts(),
            adapters=kept_adapters,
        )
        tree = PrefixTree(
            store,
            runtime.traits,
            segment_tokens=segment_tokens,
            max_checkpoints=ctx_checkpoints,
            policy=policy,
        )
        sequence = KeptSequence(
            runtime, tree, align=align, min_step=min_step, on_device=checkpoint_on_device
        )
        keeper = Keeper(llm, runtime, tree, namespace, sequence, settings.cache_dir)
        keeper._hook(llm)
        undo.pop_all()
    return keeper
