"""What is changed in SGLang is in one list, and a release that is not as the list expects is refused by name."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolloutmq.messages.errors import EngineError
from rolloutmq.worker.cpu_support import prepare_engine
from rolloutmq.worker.sglang import patches, wire

ROOT = Path(__file__).resolve().parents[3]
ROOM = "worker/sglang"
LISTED = {patch.what: patch for patch in patches.PATCHES}
CALLS = {"original", "replace", "replace_on"}
"""Functions of `patches` that are given the name of an attribute."""


class Module:
    """One file of the package: what of SGLang it touches, and how."""

    def __init__(self, source: str, path: str = "made_up.py") -> None:
        self.path = path
        self._tree = ast.parse(source)
        self._sglang: dict[str, str] = {}  # a name in the file -> what of SGLang it is
        self._own: set[str] = set()  # names of anything else that can be a base class
        self.named: set[str] = set()
        for node in ast.walk(self._tree):
            self._bind(node)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                if node.level == 0 and (node.module or "").split(".")[0] == "sglang":
                    self._sglang[name.asname or name.name] = f"{node.module}.{name.name}"
                else:
                    self._own.add(name.asname or name.name)
        elif isinstance(node, ast.Import):
            for name in node.names:
                root = name.asname or name.name.split(".")[0]
                (self._sglang.__setitem__(root, root) if root == "sglang" else self._own.add(root))
        elif isinstance(node, ast.ClassDef):
            self._own.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if self._patching(node.value) == "original" and isinstance(targets[0], ast.Name):
                self._sglang[targets[0].id] = f"sglang.srt.{_literal(node.value.args[0]).replace(':', '.')}"

    def imports_sglang(self) -> bool:
        return bool(self._sglang)

    def offences(self) -> Iterator[str]:
        """Changes of SGLang that are not in the list."""
        for node in ast.walk(self._tree):
            for target in _changed(node):
                if (name := self._dotted(target)) is not None:
                    yield f"{self.path}:{target.lineno}: {name} is changed; use patches.replace"
            if isinstance(node, ast.Call):
                yield from self._call(node)
            if isinstance(node, ast.ClassDef):
                yield from self._bases(node)

    def _call(self, node: ast.Call) -> Iterator[str]:
        if self._patching(node) is None:
            return
        what = next((_literal(each) for each in node.args[:2] if _literal(each)), "")
        if "{}" in what:  # one of several: all of them are listed
            pattern = re.escape(what).replace(re.escape("{}"), r"[\w.]+")
            found = {each for each in LISTED if re.fullmatch(pattern, each)}
        else:
            found = {what} & LISTED.keys()
        self.named |= found
        if not found:
            yield f"{self.path}:{node.lineno}: {what or ast.unparse(node)} is not in the list"

    def _bases(self, node: ast.ClassDef) -> Iterator[str]:
        for base in node.bases:
            name = self._dotted(base)
            root = base
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if name is None:
                if isinstance(root, ast.Name) and root.id not in self._own and not hasattr(builtins, root.id):
                    yield f"{self.path}:{node.lineno}: {node.name} has a base of which nothing is known"
                continue
            what = next((each for each in LISTED if f"sglang.srt.{each.replace(':', '.')}" == name), None)
            if what is None:
                yield f"{self.path}:{node.lineno}: {node.name} subclasses {name}, which is not in the list"
            else:
                self.named.add(what)

    def _patching(self, node: ast.Call) -> str | None:
        """Which function of `patches` is called, if one is."""
        module, _, name = ast.unparse(node.func).partition(".")
        return name if module == "patches" and name in CALLS else None

    def _dotted(self, node: ast.AST) -> str | None:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self._sglang:
            return ".".join([self._sglang[node.id], *parts])
        return None


def _changed(node: ast.AST) -> Iterator[Any]:
    """What a statement assigns to or deletes, and what `setattr` and `delattr` are given."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from (each for each in ast.walk(target) if isinstance(each, ast.Attribute))
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Attribute):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"setattr", "delattr"}:
        yield node.args[0]


def _literal(node: ast.AST) -> str:
    """The text of a literal, with {} for what is put in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def package() -> list[Module]:
    files = [
        path for folder in ("messages", "sync", "producer", "worker", "ops") for path in (ROOT / folder).rglob("*.py")
    ]
    return [Module(path.read_text(), str(path.relative_to(ROOT))) for path in files]


def test_sglang_is_imported_in_its_room_alone() -> None:
    found = [module.path for module in package() if module.imports_sglang() and not module.path.startswith(f"{ROOM}/")]
    assert found == []


def test_every_change_of_sglang_is_in_the_list_and_the_list_has_no_other() -> None:
    modules = [module for module in package() if module.path.startswith(f"{ROOM}/")]
    assert [offence for module in modules for offence in module.offences()] == []
    assert LISTED.keys() - {name for module in modules for name in module.named} == set()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("from sglang.srt import server_args\nserver_args.x = 1", "server_args.x is changed"),
        ("import sglang\nsglang.srt.a.B.c += 1", "sglang.srt.a.B.c is changed"),
        ("from sglang.srt.a import B as C\nx, C.d = 1, 2", "sglang.srt.a.B.d is changed"),
        ("from sglang.srt.a import B\ndef f():\n    setattr(B, 'c', 1)", "sglang.srt.a.B is changed"),
        ("from sglang.srt.a import B\nclass C(B): pass", "C subclasses sglang.srt.a.B"),
        ("def f(base):\n    class C(base): pass", "base of which nothing is known"),
        (
            'from . import patches\nb = patches.original("managers.scheduler:Scheduler")\nb.run = 1',
            "managers.scheduler.Scheduler.run is changed",
        ),
    ],
)
def test_a_change_beside_the_list_is_found(source: str, why: str) -> None:
    [offence] = Module(source).offences()
    assert why in offence


def test_what_is_not_sglangs_may_be_changed() -> None:
    source = "import torch\nfrom sglang.srt.a import f\nclass A: pass\nclass B(A, torch.nn.Module): pass\nA.x = f(1)"
    assert list(Module(source).offences()) == []


# --- the check at the start -------------------------------------------------------------------------------------------


@pytest.mark.sglang
@pytest.mark.parametrize("part", ["worker", "scheduler", "cpu", "cpu seeds", "cpu experts", "cpu grammars"])
def test_the_installed_release_is_as_expected(part: Any) -> None:
    prepare_engine()
    patches.check(part)
    assert any(patch.part == part for patch in patches.PATCHES)


@pytest.mark.sglang
def test_the_loaders_that_sglang_is_told_are_there() -> None:
    prepare_engine()
    for name in (wire.COMMIT_LOADER, wire.HEAD_LOADER):
        module, _, function = name.rpartition(".")
        assert callable(getattr(import_module(module), function))


def fake(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.torch_native_backend", SimpleNamespace(**attributes))


BACKEND = "layers.attention.torch_native_backend:TorchNativeAttnBackend"


def test_an_attribute_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    with pytest.raises(EngineError, match=r"SGLang .*: sglang\.srt\.layers\..*\.TorchNativeAttnBackend is not there"):
        patches.check("cpu")


def test_a_method_that_is_gone_is_named_with_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, TorchNativeAttnBackend=type("TorchNativeAttnBackend", (), {}))
    with pytest.raises(
        EngineError, match=r"has no _run_sdpa_forward_decode, _run_sdpa_forward_extend; .* as in 0\.5\.17 to 0\.5\.23; "
    ):
        patches.check("cpu")


def test_a_parameter_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(XGrammarGrammar=SimpleNamespace(apply_vocab_mask=lambda logits, bits: None))
    monkeypatch.setitem(sys.modules, "sglang.srt.constrained.xgrammar_backend", module)
    with pytest.raises(EngineError, match=r"apply_vocab_mask takes no vocab_mask, only logits, bits; expected is one"):
        patches.replace("constrained.xgrammar_backend:XGrammarGrammar.apply_vocab_mask", None)


def test_older_releases_need_not_have_what_came_later(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "sglang.srt.state_capturer.base", module)
    patches.check("cpu experts")
    patches.replace("state_capturer.base:ALLOC_MEMORY_FUNCS", {})
    assert not vars(module)


def test_what_is_replaced_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("_run_sdpa_forward_decode", "_run_sdpa_forward_extend")
    own = type("Own", (), dict.fromkeys(names, 1))
    fake(monkeypatch, TorchNativeAttnBackend=type("Theirs", (), dict.fromkeys(names, 0)))
    patches.replace(BACKEND, own)
    assert patches.original(BACKEND) is own
    with pytest.raises(KeyError):
        patches.replace("layers.sampler:nothing", own)
