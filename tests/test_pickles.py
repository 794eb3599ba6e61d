"""Pickles are read as data: real ones as what they hold, harmful ones not at all, broken ones as broken."""

from __future__ import annotations

import codecs
import collections
import contextlib
import copyreg
import io
import os
import pickle
import random
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_fsdp_tools.errors import DamagedCheckpointError, UnsafePickleError, UsageError
from accel_fsdp_tools.formats.allowed import DCP_METADATA, TORCH_STATE
from accel_fsdp_tools.formats.pickled import ArrayRef, GlobalRef, NumpyDtype, PickledObject, TensorRef
from accel_fsdp_tools.formats.pickles import load_pickle, scan_pickle
from tests.attacks import BOMB_NAME, Bomb, Settings, save_to_bytes, text

KNOWN = (UnsafePickleError, DamagedCheckpointError)

# -- an audit hook sees every import of a name by an unpickler, every exec and every command -------------------------

_watching = False
_seen: list[str] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in ("pickle.find_class", "exec", "compile", "os.system", "os.mkdir", "subprocess.Popen"):
        _seen.append(event)


sys.addaudithook(_audit)
for _codec in ("raw-unicode-escape", "latin-1", "utf-32-le", "utf-32-be", "ascii", "rot13"):
    codecs.lookup(_codec)  # imported at the first use, which the hook would see


@pytest.fixture(autouse=True)
def _nothing_executed() -> Iterator[None]:
    global _watching
    _seen.clear()
    yield
    _watching = False
    assert _seen == []


def scan(data: bytes, **options: Any) -> frozenset[str]:
    global _watching
    _watching = True
    try:
        return scan_pickle(data, where="test", **options)
    finally:
        _watching = False


def load(data: bytes, **options: Any) -> Any:
    global _watching
    _watching = True
    try:
        return load_pickle(data, where="test", **options)
    finally:
        _watching = False


def dump_like_torch(value: Any) -> bytes:
    """Return the `data.pkl` that torch.save writes."""
    with zipfile.ZipFile(io.BytesIO(save_to_bytes(value))) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


# -- what real writers write -----------------------------------------------------------------------------------------

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**3000), max_value=2**3000)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.binary().map(bytearray)
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(collections.OrderedDict)
        | st.dictionaries(keys, inner, max_size=4).map(lambda value: collections.defaultdict(list, value))
        | st.lists(inner, max_size=4).map(lambda value: collections.deque(value, 9))
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
        | st.dictionaries(st.text(), st.integers(), max_size=4).map(collections.Counter)
    ),
    max_leaves=25,
)


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [_types(item) for item in value.values()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value), [_types(item) for item in value]
    return type(value)


@settings(max_examples=300, deadline=None)
@given(nested, st.integers(0, 5))
def test_plain_data_comes_back_equal_and_is_never_refused(value: Any, protocol: int) -> None:
    data = pickle.dumps(value, protocol=protocol)
    scan(data)
    again = load(data)
    assert again == value
    assert _types(again) == _types(value)


def test_shared_and_recursive_structures_survive() -> None:
    loop: list[Any] = [1]
    loop.append({"loop": loop})
    again = load(pickle.dumps([loop, loop]))
    assert again[0] is again[1]
    assert again[0][1]["loop"] is again[0]


def test_tensors_become_references() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    value = {
        "whole": base,
        "part": base[1:3, ::2],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "u16": torch.ones(2, dtype=torch.uint16),
        "f8": torch.ones(5).to(torch.float8_e4m3fn),
        "complex": torch.ones(2, dtype=torch.complex64),
        "bool": torch.ones(2, dtype=torch.bool),
    }
    again = load(dump_like_torch(value))
    assert list(again) == list(value)
    for name, tensor in value.items():
        found = again[name]
        assert isinstance(found, TensorRef), name
        assert found.dtype == str(tensor.dtype).removeprefix("torch.")
        assert (found.shape, found.strides, found.offset) == (
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
        )
        assert found.storage.size_bytes == tensor.untyped_storage().nbytes()
        assert found.requires_grad == tensor.requires_grad or name == "parameter"
    assert again["whole"].storage is not again["scalar"].storage
    assert again["whole"].storage.key == again["part"].storage.key


def test_a_tensor_with_attributes_is_a_tensor() -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    tensor.note = parameter.note = "hung on"  # type: ignore[attr-defined]
    again = load(dump_like_torch([tensor, parameter]))
    assert [type(value) for value in again] == [TensorRef, TensorRef]


def test_a_state_dict_keeps_its_order() -> None:
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()
    again = load(dump_like_torch(state))
    assert type(again) is collections.OrderedDict
    assert list(again) == list(state)


def test_random_states() -> None:
    states = {
        "step": 7,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    again = load(dump_like_torch(states))
    assert again["random_state"] == states["random_state"]
    name, keys_, *rest = again["numpy_random_seed"]
    assert (name, rest) == (states["numpy_random_seed"][0], list(states["numpy_random_seed"][2:]))
    assert np.array_equal(np.frombuffer(keys_.data, keys_.dtype.order + keys_.dtype.code), np.random.get_state()[1])
    assert again["torch_manual_seed"].shape == (len(torch.get_rng_state()),)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_numpy_values(protocol: int) -> None:
    scalars = [np.float64(1.5), np.float32(0.5), np.float16(2), np.int32(-3), np.uint64(2**63), np.bool_(True)]
    scalars += [np.complex64(1 + 2j), np.str_("häß"), np.bytes_(b"ab")]
    assert load(pickle.dumps(scalars, protocol)) == [value.item() for value in scalars]
    arrays = [np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.array(["ab", "c"])]
    arrays += [np.zeros((0, 2)), np.array(3.0), np.array([b"x", b"yz"]), np.ones(2, dtype=np.longdouble)]
    for array, again in zip(arrays, load(pickle.dumps(arrays, protocol)), strict=True):
        assert isinstance(again, ArrayRef)
        dtype = np.dtype(again.dtype.order + again.dtype.code)
        found = np.frombuffer(again.data, dtype).reshape(again.shape, order="F" if again.fortran else "C")
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
    assert load(pickle.dumps(np.dtype("<f4"), protocol)) == NumpyDtype("f4", "<")


def test_other_values_of_torch() -> None:
    value = [torch.float8_e5m2, torch.Size([2, 3]), torch.device("cuda", 1), torch.device("cpu"), torch.strided]
    again = load(dump_like_torch(value))
    assert again == [GlobalRef("torch.float8_e5m2"), (2, 3), "cuda:1", "cpu", GlobalRef("torch.strided")]
    stream = load(dump_like_torch(io.BytesIO(b"abc")))
    assert (stream.name, stream.state) == ("_io.BytesIO", (b"abc", 0, None))


def test_python_would_not_map_an_allowed_name_to_another() -> None:
    import _compat_pickle

    for name in {*TORCH_STATE.rules, *DCP_METADATA.rules}:
        module, _, attribute = name.rpartition(".")
        assert (module, attribute) not in _compat_pickle.NAME_MAPPING
        assert module not in _compat_pickle.IMPORT_MAPPING


def test_allowed_names_exist_or_are_known_to_be_old() -> None:
    """A typing mistake in a list would refuse real checkpoints; names of older versions can't be checked here."""
    import importlib

    missing = set()
    for name in {*TORCH_STATE.rules, *DCP_METADATA.rules}:
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                target: Any = importlib.import_module(".".join(parts[:cut]))
            except ImportError:
                continue
            for part in parts[cut:]:
                target = getattr(target, part, None)
            if target is not None:
                break
        else:
            missing.add(name)
    assert all(
        name.startswith(("torch.distributed._tensor.", "torch.cuda.", "torch.UntypedStorage")) for name in missing
    ), missing


# -- what must be refused --------------------------------------------------------------------------------------------

_PATH = "/nonexistent/canary"
_MKDIR = b"c" + os.mkdir.__module__.encode() + b"\nmkdir\n"
_STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
_DTYPE = b"cnumpy\ndtype\n" + text("f8") + b"\x89\x88\x87R"
_NDARRAY = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
_OBJECT_DTYPE = b"cnumpy\ndtype\n" + text("O8") + b"\x89\x88\x87R"
_ORDERED = b"ccollections\nOrderedDict\n)R"

ATTACKS: dict[str, tuple[bytes, str]] = {
    "global": (b"\x80\x02" + _MKDIR + text(_PATH) + b"\x85R.", BOMB_NAME),
    "named and dropped": (b"\x80\x02" + _MKDIR + b"0N.", BOMB_NAME),
    "names from the memo": (
        b"\x80\x04" + text("mkdir", 4) + b"\x94" + text(os.mkdir.__module__, 4) + b"q\x050h\x05h\x00\x93.",
        BOMB_NAME,
    ),
    "name below a mark": (b"\x80\x04" + text("os", 4) + b"(1" + text("system", 4) + b"\x93.", "os.system"),
    "inst": (b"(" + text(_PATH) + b"i" + os.mkdir.__module__.encode() + b"\nmkdir\n.", BOMB_NAME),
    "inst of a known class": (b"(icollections\nOrderedDict\n.", "INST"),
    "obj": (b"(" + _MKDIR + text(_PATH) + b"o.", BOMB_NAME),
    "obj of a known class": (b"(ccollections\nOrderedDict\no.", "OBJ"),
    "extension 1": (b"\x80\x02\x82\xf0.", "extension"),
    "extension 2": (b"\x80\x02\x83\xf0\x01.", "extension"),
    "extension 4": (b"\x80\x02\x84\xf0\x01\x00\x00.", "extension"),
    "persistent text": (b"Pstorage\n.", "persistent"),
    "persistent module": (b"\x80\x02(" + text("module") + b"NNNtQ.", "persistent"),
    "attributes of a known function": (
        b"\x80\x04" + text("torch._utils", 4) + text("_rebuild_tensor_v2.__globals__", 4) + b"\x93.",
        "torch._utils._rebuild_tensor_v2.__globals__",
    ),
    "attributes in old form": (
        b"\x80\x04ctorch._utils\n_rebuild_tensor_v2.__globals__\n.",
        "torch._utils._rebuild_tensor_v2.__globals__",
    ),
    "getattr": (
        b"\x80\x02c__builtin__\ngetattr\nctorch.nn.parameter\nParameter\n" + text("__init__") + b"\x86R.",
        "torch.nn.parameter.Parameter.__init__",
    ),
    "getattr on a value": (b"\x80\x02cbuiltins\ngetattr\nNX\x01\0\0\0x\x86R.", "builtins.getattr"),
    "new object with keywords": (b"\x80\x04ccollections\nOrderedDict\n)}\x92.", "collections.OrderedDict"),
    "new object of a function": (b"\x80\x02c_codecs\nencode\n)\x81.", "_codecs.encode"),
    "call of a class": (b"\x80\x02ctorch.distributed.device_mesh\nDeviceMesh\n)R.", "DeviceMesh"),
    "call of a value": (b"\x80\x02})R.", "not a named function"),
    "change to a class": (b"\x80\x02ctorch.nn.parameter\nParameter\n}" + text("x") + b"Nsb.", "Parameter itself"),
    "special attributes": (
        b"\x80\x02ctorch.distributed.tensor.placement_types\nShard\n)\x81}" + text("__class__") + b"Nsb.",
        "special attributes",
    ),
    "second pickle": (pickle.dumps(1) + b"\x80\x02" + _MKDIR + b".", BOMB_NAME),
    "backward hooks": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + _STORAGE
        + b"K\0K\x04\x85K\x01\x85\x88ccollections\nOrderedDict\n)RK\x01Nstb.".replace(b"tb.", b"tR."),
        "backward hooks",
    ),
    "hooks as attributes": (
        b"\x80\x02ctorch._utils\n_rebuild_parameter_with_state\n(ctorch._utils\n_rebuild_tensor_v2\n("
        + _STORAGE
        + b"K\0K\x04\x85K\x01\x85\x88NtR\x88N}"
        + text("_backward_hooks")
        + b"NstR.",
        "special attributes",
    ),
    "rebuild by another function": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(c_codecs\nencode\nctorch\nTensor\n)NtR.",
        "_rebuild_from_type_v2",
    ),
    "rebuild into another class": (
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\n"
        b"ccollections\nOrderedDict\n(" + _STORAGE + b"K\0K\x04\x85K\x01\x85\x88NtNtR.",
        "_rebuild_from_type_v2",
    ),
    "wrapper of another class": (
        b"\x80\x02ctorch._utils\n_rebuild_wrapper_subclass\nccollections\nOrderedDict\n\x85R.",
        "_rebuild_wrapper_subclass",
    ),
    "factory": (
        b"\x80\x02ccollections\ndefaultdict\nc_codecs\nencode\n\x85R.",
        "collections.defaultdict",
    ),
    "codec": (b"\x80\x02c_codecs\nencode\n" + text("x") + text("rot13") + b"\x86R.", "_codecs.encode"),
    "layout": (b"\x80\x02ctorch.serialization\n_get_layout\n" + text("os.system") + b"\x85R.", "_get_layout"),
    "dtype of objects": (_OBJECT_DTYPE + b".", "numpy.dtype"),
    "forged dtype": (_DTYPE + b"(K\x03" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb.", "forged"),
    "dtype with fields": (_DTYPE + b"(K\x03" + text("|") + b"N}}K\x08K\x01K\0tb.", "forged"),
    "array of objects": (_NDARRAY + b"(K\x01K\x01\x85" + _DTYPE + b"\x89]Natb.", "numpy array of Python objects"),
    "array of another class": (
        b"cnumpy._core.multiarray\n_reconstruct\nccollections\nOrderedDict\nK\x00\x85C\x01b\x87R.",
        "_reconstruct",
    ),
}
for _name in (
    *("builtins.eval", "builtins.exec", "builtins.__import__", "builtins.open", "builtins.compile"),
    *("builtins.globals", "builtins.map", "__builtin__.eval", "functools.partial", "operator.attrgetter"),
    *("operator.methodcaller", "_operator.itemgetter", "torch.load", "torch.hub.load", "torch.jit.load"),
    *("torch.storage._load_from_bytes", "torch.serialization.load", "pickle.loads", "_pickle.loads"),
    *("importlib.import_module", "codecs.decode", "_codecs.lookup", "types.FunctionType"),
    *("types.CodeType", "copyreg._reconstructor", "copy_reg.__newobj__", "numpy.load"),
    *("numpy.core.multiarray.fromfile", "numpy._core.multiarray.frombuffer", "os.system", "posix.system"),
    *("nt.system", "subprocess.Popen", "runpy.run_path", "collections.namedtuple", "builtins.object"),
    *("builtins.type", "torch.utils.data.DataLoader", "transformers.training_args.TrainingArguments"),
    *("pathlib.Path.touch"),
):
    _module, _, _attribute = _name.rpartition(".")
    ATTACKS[f"name {_name}"] = (
        b"\x80\x02c" + _module.encode() + b"\n" + _attribute.encode() + b"\n)R.",
        _name.replace("__builtin__", "builtins").replace("numpy.core", "numpy._core"),
    )


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_are_refused_by_name(attack: str) -> None:
    data, expected = ATTACKS[attack]
    with pytest.raises(UnsafePickleError) as caught:
        scan(data, path="p")
    assert expected in str(caught.value)
    assert (caught.value.path, str(caught.value).startswith("test")) == ("p", True)
    if attack != "second pickle":
        with pytest.raises(UnsafePickleError):
            load(data)


def test_a_registered_extension_is_refused_too() -> None:
    copyreg.add_extension("os", "mkdir", 240)
    try:
        with pytest.raises(UnsafePickleError):
            scan(b"\x80\x02\x82\xf0" + text(_PATH) + b"\x85R.")
    finally:
        copyreg.remove_extension("os", "mkdir", 240)


@pytest.mark.parametrize("protocol", range(6))
def test_an_object_of_an_unknown_class(protocol: int, tmp_path: Path) -> None:
    with pytest.raises(UnsafePickleError, match="mkdir"):
        scan(pickle.dumps([1, Bomb(tmp_path / "canary")], protocol))
    with pytest.raises(UnsafePickleError):
        scan(pickle.dumps(Settings(), protocol))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_classes_that_the_user_admits(protocol: int) -> None:
    allow = TORCH_STATE.with_objects(["tests.attacks.Settings", "tests.attacks.Settings.Inner"], "trust {name}?")
    again = load(pickle.dumps({"s": Settings()}, protocol), allow=allow)["s"]
    assert isinstance(again, PickledObject)
    assert again.name == "tests.attacks.Settings"
    assert again.get_attributes()["rate"] == 0.5
    scan(pickle.dumps([Settings.Inner], protocol), allow=allow)  # the class itself, nested
    with pytest.raises(UnsafePickleError, match=r"trust 'tests\.attacks\.Bomb'") as caught:
        scan(pickle.dumps(Bomb, protocol), allow=allow)
    assert caught.value.actual == "tests.attacks.Bomb"


@pytest.mark.parametrize("name", ["Settings", "os.system", "builtins.eval", "a..b", "functools.partial", ""])
def test_impossible_admissions(name: str) -> None:
    with pytest.raises(UsageError):
        TORCH_STATE.with_objects([name], "")


def test_a_state_is_taken_as_it_is_at_that_moment() -> None:
    """A pickle may change a dict after an object was built from it; the object keeps the first values."""
    name = b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n"
    change = b"0h\x00" + text("offset") + b"K\x02s0h\x01."
    data = b"\x80\x02" + name + b")\x81q\x01}q\x00" + text("offset") + b"K\x01sb" + change
    assert load(data, allow=DCP_METADATA).get_attributes() == {"offset": 1} == pickle.loads(data).__dict__


def test_metadata_may_not_name_tensors_and_state_may_not_name_metadata() -> None:
    data = dump_like_torch(torch.ones(2))
    with pytest.raises(UnsafePickleError):
        scan(data, allow=DCP_METADATA)
    with pytest.raises(UnsafePickleError, match="persistent id"):
        scan(b"\x80\x02(" + text("storage") + b"tQ.", allow=DCP_METADATA)
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    with pytest.raises(UnsafePickleError, match="BytesStorageMetadata"):
        scan(pickle.dumps(BytesStorageMetadata()))


# -- what is broken --------------------------------------------------------------------------------------------------

DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "no stop": b"\x80\x02",
    "trailing": b"\x80\x02N.garbage",
    "huge memo number": b"\x80\x02Nr\xff\xff\xff\xff.",
    "unset memo": b"\x80\x02h\x07.",
    "huge length": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "huge frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.",
    "underflow": b"\x80\x02\x86.",
    "below the mark": b"\x80\x02N(\x85.",
    "out of band": b"\x80\x05\x97.",
    "protocol": b"\x80\x09N.",
    "odd items": b"\x80\x02}(Nu.",
    "list as key": b"\x80\x02}]Ns.",
    "items for a number": b"\x80\x02K\x01Na.",
    "state for a dict": b"\x80\x02}}b.",
    "number": b"I12x\n.",
    "number with underscores": b"I1_2\n.",
    "tensor beyond its storage": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    + _STORAGE
    + b"K\x01K\x04\x85K\x01\x85\x88NtR.",
    "tensor with negative strides": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
    + _STORAGE
    + b"K\0K\x04\x85J\xff\xff\xff\xff\x85\x88NtR.",
    "array too short": _NDARRAY + b"(K\x01K\x02\x85" + _DTYPE + b"\x89C\x08" + b"\0" * 8 + b"tb.",
    "very deep key": b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.",
    "marks": b"(" * 1_000_000 + b".",
    "copies": b"\x80\x02]("
    + b"N" * 50_000
    + b"eq\x00"
    + b"0ccollections\ndeque\nq\x010"
    + b"h\x01h\x00\x85R0" * 50_000
    + b"N.",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_broken_pickles(name: str) -> None:
    started = time.process_time()
    with pytest.raises(DamagedCheckpointError) as caught:
        load(DAMAGED[name], path="p")
    assert time.process_time() - started < 5
    assert caught.value.path == "p"
    assert len(str(caught.value)) < 700


def test_a_pickle_cut_off_anywhere_is_damaged() -> None:
    data = dump_like_torch({"w": torch.ones(2), "n": np.ones(2), "s": "text", "b": b"bytes"})
    for length in range(len(data)):
        with pytest.raises(KNOWN):
            scan(data[:length])


@pytest.mark.parametrize("depth", [100_000])
def test_deep_nesting_does_not_exhaust_the_stack(depth: int) -> None:
    scan(b"\x80\x02" + b")" + b"\x85" * depth + b".")
    scan(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")


def test_an_unknown_name_of_any_length_makes_a_short_message() -> None:
    with pytest.raises(UnsafePickleError) as caught:
        scan(b"c" + b"x" * 100_000 + b"\ny\n.")
    assert len(str(caught.value)) < 1000


# -- random damage, and a comparison with CPython's own unpickler ----------------------------------------------------


def _corpus() -> list[bytes]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

    metadata = Metadata({"a": ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))}, {"a": ("x", 0)})
    metadata.storage_data = {MetadataIndex("a", [0], 1): Path("b")}
    return [
        dump_like_torch({"w": torch.ones(2, 3), "p": torch.nn.Parameter(torch.ones(2)), "s": {1}, "c": 1j}),
        dump_like_torch({"random": np.random.get_state(), "b": b"abc", "d": torch.uint16}),
        pickle.dumps(metadata),
        pickle.dumps([np.float64(1), np.array(["a"]), {"x": (1, 2.5, None)}, bytearray(b"z")], 5),
        pickle.dumps({"a": [1, -2, "é", 3.5, True], "b": Settings()}, 0),
    ]


CORPUS = _corpus()
BOTH = type(TORCH_STATE)({**TORCH_STATE.rules, **DCP_METADATA.rules})


class _Recorder(pickle.Unpickler):
    """CPython's unpickler with names that do nothing; records those that it would import."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.names: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> Any:
        self.names.append((module, name))
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


class _Inert:
    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def __hash__(self) -> int:
        return 1


def _compare(data: bytes) -> None:
    """Whatever our machine accepts, CPython must not see another name in."""
    from accel_fsdp_tools.formats.allowed.rules import join_name

    try:
        names = scan(data, allow=BOTH)
    except KNOWN:
        return
    recorder = _Recorder(data)
    with contextlib.suppress(Exception):  # CPython may be stricter; the names up to there count
        recorder.load()
    assert {join_name(*name) for name in recorder.names} <= names


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(CORPUS), st.lists(st.tuples(st.integers(0), st.binary(max_size=3)), max_size=4), st.booleans())
def test_mutations_are_harmless(data: bytes, edits: list[tuple[int, bytes]], insert: bool) -> None:
    mutated = bytearray(data)
    for where, content in edits:
        place = where % (len(mutated) + 1)
        mutated[place : place if insert else place + len(content)] = content
    with contextlib.suppress(*KNOWN):
        load(bytes(mutated), allow=BOTH)
    _compare(bytes(mutated))


_PIECES = [
    *(bytes([code]) for code in b"(.012)]}tlduseabNR\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94"),
    *(b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"p3\n", b"g3\n", b"r\x02\0\0\0", b"j\x02\0\0\0"),
    *(text(word, 4) for word in ("os", "system", "collections", "OrderedDict", "torch", "Size")),
    *(b"K\x01", b"I01\n", b"V\\u0061\n", b"\x80\x04", b"\x80\x02", b"\x95\x01\0\0\0\0\0\0\0", b"C\x01x"),
    *(b"ccollections\nOrderedDict\n", b"ctorch\nSize\n", b"c__builtin__\nset\n", b"Pa\n", b"\x82\x01", b"Q"),
]


@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=40))
def test_random_programs_never_hide_a_name(pieces: list[bytes]) -> None:
    _compare(b"".join(pieces) + b".")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    _compare(data)
