"""From settings to an engine: the model, its namespace, the tiers, the slots."""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil

from llamakeep.chat_template import BUILT_IN, ChatTemplate
from llamakeep.engine import Engine, Keeping, PromptKeeping, TreeKeeping
from llamakeep.errors import InvalidValue, ModelError, StoreError, TemplateError
from llamakeep.fingerprint import Namespace, read_adapters
from llamakeep.gguf import Header, read_header, split_parts
from llamakeep.modelfile import inspect_file
from llamakeep.prompt_cache import PromptCache
from llamakeep.runtime.base import Runtime, Vocab
from llamakeep.server.settings import ServerSettings
from llamakeep.stores.base import TreeStore
from llamakeep.stores.descriptions import MOST_DESCRIBED
from llamakeep.stores.disk import layout
from llamakeep.stores.envelope import seal_key
from llamakeep.stores.redis.keys import RedisKeys
from llamakeep.tiers import TierSettings
from llamakeep.tree import PrefixTree

T = TypeVar("T")

SEGMENT_TOKENS = 256
"""Longest span that is kept as one piece, as with `attach`: so both can share what is on disk."""
_SERVER_SALT = "server_salt_id"
"""In the description of a tenant: the `salt_id` of the server itself, of which it is one."""


def _in_a_thread(load: Callable[[], T]) -> T:
    """Run something in a thread of its own, which ends with it.

    What evaluates leaves a team of OpenMP threads behind for its thread. With more threads in teams
    than there are processors, all of them sleep at each barrier instead of spinning, which takes
    twice as long for a token: so none but the engine's thread may have one.
    """
    with ThreadPoolExecutor(1, "llamakeep-load") as pool:
        return pool.submit(load).result()


class Tenants:
    """The namespaces of one server's tenants. From any thread.

    The tiers below hear of one with the first state that they get of it: clients choose how many
    there are, and most of what they ask leaves nothing.

    Args:
        namespace: Of the server itself, whose salt all tenants have.
        store: Hears of each.
    """

    def __init__(self, namespace: Namespace, store: TreeStore) -> None:
        self._namespace = namespace
        self._store = store
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[bytes, dict[str, Any]]] = OrderedDict()

    def __call__(self, salt: str) -> bytes:
        """Return what makes the states of the tenant with this salt incompatible with others.

        Of a tenant that was not seen for long it is computed again.
        """
        with self._lock:
            found = self._known.get(salt)
            if found is None:
                found = self._known[salt] = self._of(salt)
                if len(self._known) > MOST_DESCRIBED:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(salt)
        self._store.introduce(*found)
        return found[0]

    def _of(self, salt: str) -> tuple[bytes, dict[str, Any]]:
        """Return the namespace of a tenant and its description."""
        namespace = self._namespace
        if not salt:
            return namespace.digest, namespace.describe()
        own = namespace.salt
        own = own.decode("utf-8", "surrogatepass") if isinstance(own, bytes) else own
        of_tenant = replace(namespace, salt=json.dumps([own, salt]))
        said = {**of_tenant.describe(), _SERVER_SALT: namespace.describe()["salt_id"]}
        return of_tenant.digest, said

    def described(self, digest: bytes) -> Mapping[str, Any] | None:
        """Return the description of a namespace; None for a tenant that was not seen for long."""
        if digest == self._namespace.digest:
            return self._namespace.describe()
        with self._lock:
            return next((said for one, said in self._known.values() if one == digest), None)

    def all(self) -> list[bytes]:
        """Return every namespace of this model, these settings and this server's own salt.

        Those in the tiers below, whatever process put them there, and those of the tenants that
        were seen last.
        """
        mine = _of_server(self._namespace.describe())
        with self._lock:
            found = {digest for digest, _ in self._known.values()}
        for tier in self._store.below:
            for digest, description in tier.namespaces().items():
                if _of_server(description) == mine:
                    found.add(digest)
        return sorted(found)


def _of_server(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a description has in common with those of all tenants of one server."""
    of_a_tenant = ("digest", "salted", "salt_id", _SERVER_SALT)
    said = {name: value for name, value in description.items() if name not in of_a_tenant}
    return said | {_SERVER_SALT: description.get(_SERVER_SALT, description.get("salt_id"))}


def load_engine(
    settings: ServerSettings, on_progress: Callable[[float], None] | None = None
) -> Engine:
    """Load the model and start an engine on it, which owns both.

    Args:
        settings: What to load, and how.
        on_progress: Called with the share of the model that is loaded, 0 to 1.

    Raises:
        ModelError: For a file that is no model, or a context that cannot be made.
        InvalidValue: For a value that this model cannot have, such as a context too small for its
            slots.
        StoreError: For a directory or server that cannot keep states.
    """
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    tiers = tiers_of(settings)
    with ExitStack() as undo:
        model = inspect_file(settings.model, cache_dir=tiers.cache_dir)
        adapters = read_adapters(settings.adapters, cache_dir=tiers.cache_dir)
        load = partial(
            LlamaCppRuntime.load,
            settings.model,
            n_ctx=settings.ctx_size,
            n_seqs=settings.parallel,
            n_batch=settings.batch_size,
            n_ubatch=settings.ubatch_size,
            n_gpu_layers=settings.gpu_layers,
            n_threads=settings.threads,
            n_threads_batch=settings.threads_batch,
            flash_attn=cast(Any, settings.flash_attn),  # one of the words that it takes
            type_k=settings.cache_type_k,
            type_v=settings.cache_type_v,
            swa_full=settings.swa_full,
            use_mmap=settings.use_mmap,
            use_mlock=settings.use_mlock,
            segment_tokens=SEGMENT_TOKENS,
            on_progress=on_progress,
        )
        runtime = _in_a_thread(load)
        undo.callback(runtime.close)
        if adapters:
            loaded = [(runtime.load_adapter(path), scale) for path, scale in settings.adapters]
            runtime.set_adapters(loaded)
        namespace = tiers.namespace(
            runtime.traits,
            model.fingerprint,
            model_name=settings.model.name,
            segment_tokens=SEGMENT_TOKENS,
            context=runtime.namespace_settings(rope_factors=model.rope_factors),
            build=runtime.build_facts(),
            adapters=adapters,
        )
        capacity = settings.capacity_bytes(psutil.virtual_memory().available)
        keeping = keeping_of(settings, tiers, runtime, namespace, capacity)
        undo.callback(keeping.close, 0.0)
        engine = Engine(
            runtime,
            keeping,
            model_name=settings.aliases[0],
            model_facts=runtime.model_facts(),
            file_key=seal_key(tiers.secret),
            max_waiting=settings.queue,
            park_idle=settings.cache_idle_slots,
            align=settings.align,
        )
        undo.pop_all()
    return engine


def check(settings: ServerSettings) -> None:
    """Raise for what a start would refuse, as far as that is known without loading the model.

    Reads the headers of model and adapters. Changes nothing, and asks no server.

    Raises:
        ModelError: For a model or adapter that is missing, or is no GGUF file.
        InvalidValue: For what cannot be meant.
        StoreError: For a directory that is no cache of states, or a package that is missing.
    """
    settings.check_files()
    for path in (settings.model, *(path for path, _ in settings.adapters)):
        if _header(path).n_parts > 1:
            for part in split_parts(path):
                _header(part)
    template_of(settings)
    tiers = tiers_of(settings)
    if tiers.cache_dir is not None:
        try:
            _check_cache_dir(tiers.cache_dir)
        except OSError as error:
            raise InvalidValue(f"{settings.where('cache_dir')}: {error}") from None
        except StoreError as error:
            raise StoreError(f"{settings.where('cache_dir')}: {error}") from None
    if tiers.redis_url is not None:
        replace(tiers, cache_dir=None).open(0).close(0.0)


def _header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            return read_header(file, os.fstat(file.fileno()).st_size, path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _check_cache_dir(path: Path) -> None:
    """Raise for a directory that cannot be made, or not be used for states.

    Raises:
        OSError: When it cannot be made or read.
        StoreError: When it holds other things, or nothing and may not be written to.
    """
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is no directory")
    is_cache = there == path and (path / layout.FORMAT_FILE).exists()
    if not is_cache and not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"{there} may not be written to")
    others = layout.strangers(path) if there == path and not is_cache else []
    if others:
        raise StoreError(f"{path} is no cache of states: it holds {others[0]!r}")


def template_of(settings: ServerSettings, vocab: Vocab | None = None) -> ChatTemplate | None:
    """Return the template for chats; None for a model that has none, which can still complete.

    Args:
        settings: May have one.
        vocab: Has the model's own, and the tokens that templates write; None before it is loaded.

    Raises:
        InvalidValue: For a text that is no template, or cannot be read.
        TemplateError: For the model's own, if that cannot be read.
    """
    own, source = settings.read_chat_template(), None if vocab is None else vocab.chat_template
    source = own or source
    if source is None or not source.strip():
        return None
    options: dict[str, Any] = {}
    if vocab is not None:
        for name, token in (("bos_token", vocab.bos), ("eos_token", vocab.eos)):
            options[name] = "" if token is None else vocab.text([token])
        options["add_bos"] = vocab.adds_bos
    if not own:
        return ChatTemplate(source, **options)
    where = settings.where("chat_template_file" if settings.chat_template_file else "chat_template")
    if "{" not in source and source.strip() not in BUILT_IN:
        raise InvalidValue(
            f"{where}: {source[:60]!r} is no template; the built-in one is {', '.join(BUILT_IN)}"
        )
    try:
        return ChatTemplate(source, **options)
    except TemplateError as error:
        raise InvalidValue(f"{where}: {error}") from None


def trained_context(vocab: Vocab) -> int | None:
    """Return for how many tokens of context a model was trained, if it says so."""
    family = vocab.metadata.get("general.architecture", "")
    text = str(vocab.metadata.get(f"{family}.context_length", ""))
    return int(text) if text.isdecimal() else None


def tiers_of(settings: ServerSettings) -> TierSettings:
    """Return the tiers below memory that settings ask for; only the tree has any.

    Raises:
        InvalidValue: For whole prompts, or no cache, with a tier below: nothing would go there.
            For a limit without a directory, a server that others use without a secret, and a
            prefix that no key may have.
    """
    below = {
        name: getattr(settings, name)
        for name in ("cache_dir", "disk_bytes", "redis_url")
        if getattr(settings, name) is not None
    }
    if settings.cache != "tree":
        for name in below:
            if _is_meant(settings, name):
                raise InvalidValue(
                    f"{settings.where(name)}: --cache {settings.cache} keeps nothing outside of "
                    "memory; --cache tree does"
                )
        below = {}
    if _is_meant(settings, "disk_bytes") and settings.cache_dir is None:
        raise InvalidValue(
            f"{settings.where('disk_bytes')}: it limits the directory of --cache-dir, and there "
            "is none"
        )
    if "redis_url" in below and not (settings.secret or settings.allow_unauthenticated):
        raise InvalidValue(
            f"{settings.where('redis_url')}: a server that others use needs a secret, in "
            "LLAMAKEEP_SECRET or with --secret; or --allow-unauthenticated, when everyone who can "
            "write to it may decide what this server answers"
        )
    if settings.redis_prefix is not None:
        try:
            RedisKeys(settings.redis_prefix)
        except InvalidValue as error:
            raise InvalidValue(f"{settings.where('redis_prefix')}: {error}") from None
    return TierSettings.resolve(
        **below,
        redis_prefix=settings.redis_prefix,
        secret=settings.secret,
        salt=settings.salt,
        allow_unauthenticated=settings.allow_unauthenticated,
        environment={},  # the settings have read it already
    )


def _is_meant(settings: ServerSettings, name: str) -> bool:
    """Whether somebody chose a value for this server, not for all that read the environment."""
    return name in settings.sources and not settings.where(name).startswith("LLAMAKEEP_")


def keeping_of(
    settings: ServerSettings,
    tiers: TierSettings,
    runtime: Runtime,
    namespace: Namespace,
    capacity_bytes: int,
) -> Keeping:
    """Return what slots keep their states in.

    Raises:
        InvalidValue: For a policy that this kind of cache does not have.
        StoreError: For a tier that cannot be opened.
    """
    if settings.cache == "prompt":
        store = tiers.open(0)
        return PromptKeeping(
            runtime,
            PromptCache(capacity_bytes, runtime.n_ctx, policy=settings.policy),
            Tenants(namespace, store),
            similarity=settings.slot_prompt_similarity,
            ctx_checkpoints=settings.ctx_checkpoints,
            checkpoint_min_step=settings.checkpoint_min_step,
            cache_idle_slots=settings.cache_idle_slots,
            n_ubatch=min(settings.ubatch_size, runtime.n_batch),
        )
    store = tiers.open(capacity_bytes, policy=settings.policy)
    try:
        tree = PrefixTree(
            store,
            runtime.traits,
            segment_tokens=SEGMENT_TOKENS,
            max_checkpoints=settings.ctx_checkpoints,
            policy=settings.policy,
        )
        tenants = Tenants(namespace, store)
        return TreeKeeping(
            runtime,
            tree,
            tenants,
            all_namespaces=tenants.all,
            describe=tenants.described,
            similarity=settings.slot_prompt_similarity,
            align=settings.align,
            min_step=settings.checkpoint_min_step,
        )
    except BaseException:
        store.close(0.0)
        raise
