"""Fixtures shared by the whole suite: where models are, and how a `Llama` is made of one.

Tests that touch a model need no mark of their own: asking for one of the fixtures below
gives them the mark `model`, and `pytest -m "not model"` leaves them out.
"""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests import tiny_models
from tests.real_models import GEMMA3_INSTALL, SMOLLM2_INSTALL, find_gemma3, find_smollm2
from tests.redis_servers import (  # noqa: F401 - fixtures
    redis_cluster,
    redis_cluster_url,
    redis_server,
    redis_url,
)

if TYPE_CHECKING:
    from llama_cpp import Llama

# Examples are not timed: a loaded machine is no bug. In CI, Hypothesis has a profile of its own,
# which does not time them either and draws the same ones each time.
settings.register_profile("untimed", deadline=None)
if not os.environ.get("CI"):
    settings.load_profile("untimed")

MODEL_FIXTURES = {"model_dir", "smollm2_path", "gemma3_path", "make_llama"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if MODEL_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.model)


def _need_llama_cpp() -> None:
    """Skip the test where llama-cpp-python is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed: pip install -c constraints.txt -e '.[dev]'")


@pytest.fixture(scope="session")
def shared_cache_dir() -> Path:
    """A private directory that outlives the session, shared by all workers and checkouts."""
    if chosen := os.environ.get("LLAMAKEEP_TEST_CACHE"):
        path = Path(chosen)
        path.mkdir(parents=True, exist_ok=True)
        return path
    path = Path(tempfile.gettempdir()) / f"llamakeep-tests-{getpass.getuser()}"
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if hasattr(os, "getuid") and (info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode)):
        pytest.exit(f"{path} belongs to someone else; set LLAMAKEEP_TEST_CACHE to a directory")
    return path


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into the cache that the environment names, or sends states to its server."""
    mine = [name for name in os.environ if name.startswith("LLAMAKEEP_")]
    for name in set(mine) - {"LLAMAKEEP_TEST_CACHE"}:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, the small real model; also lends the tiny ones its tokenizer."""
    _need_llama_cpp()
    path = find_smollm2()
    if path is None:
        pytest.skip(f"SmolLM2 is not installed: {SMOLLM2_INSTALL}")
    return path


@pytest.fixture(scope="session")
def gemma3_path(shared_cache_dir: Path) -> Path:
    """Gemma-3-270M, a real model with sliding-window layers."""
    _need_llama_cpp()
    path = find_gemma3(shared_cache_dir)
    if path is None:
        pytest.skip(f"Gemma 3 is not installed: {GEMMA3_INSTALL}")
    return path


@pytest.fixture(scope="session")
def model_dir(shared_cache_dir: Path, smollm2_path: Path) -> Path:
    """The directory of the tiny models, written once per machine and version of the writer.

    Workers may write at the same time, each into a directory of its own; the first to
    finish gives its directory the final name, and the others throw theirs away.
    """
    final = shared_cache_dir / f"tiny-{tiny_models.content_version(smollm2_path)}"
    if not final.exists():
        partial = Path(tempfile.mkdtemp(prefix=f"{final.name}.", dir=shared_cache_dir))
        try:
            tiny_models.write_all(partial, smollm2_path)
            partial.rename(final)
        except OSError:
            if not final.exists():
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return final


@pytest.fixture(scope="session")
def tiny_model(model_dir: Path) -> Callable[[str], Path]:
    """`tiny_model("hybrid")` is the path of that family's tiny model."""
    return lambda family: model_dir / tiny_models.model_file(family)


@pytest.fixture(scope="session")
def tiny_lora(model_dir: Path) -> Path:
    """A LoRA adapter for the tiny attention model; it moves logits by about 2."""
    return model_dir / tiny_models.LORA_FILE


@pytest.fixture(params=tiny_models.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Runs the test once for each memory family."""
    name: str = request.param
    return name


@pytest.fixture
def make_llama() -> Iterator[Callable[..., Llama]]:
    """`make_llama(path, **options)` loads a quiet, seeded, single-threaded `Llama`.

    Each call loads anew: contexts hold state, so only paths are shared between tests. All
    are closed when the test ends.
    """
    _need_llama_cpp()
    from llama_cpp import Llama

    made: list[Llama] = []

    def make(path: Path, **options: Any) -> Llama:
        defaults: dict[str, Any] = {
            "n_ctx": 2048,
            "n_threads": 1,
            "n_threads_batch": 1,
            "seed": 0,
            "verbose": False,
        }
        llm = Llama(str(path), **(defaults | options))
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


@pytest.fixture
def tiny_llama(
    tiny_model: Callable[[str], Path], make_llama: Callable[..., Llama]
) -> Callable[..., Llama]:
    """`tiny_llama("swa", swa_full=False)` loads the tiny model of a family."""
    return lambda family, **options: make_llama(tiny_model(family), **options)
