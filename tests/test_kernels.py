"""From sources to kernels: includes in place, no stale text, errors at the right line, structs confirmed."""

import random
import re
import shutil

import numpy as np
import pytest

from pagedkv import kernels, params, repeats
from pagedkv.instances import INSTANCES, MAX_INSTANCES

WRITE = next(instance for instance in INSTANCES if instance.kernel == "reshape_and_cache_flash")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the CUDA sources that a test may edit, in the place of the real ones."""
    folder = tmp_path / "cuda"
    shutil.copytree(kernels.source_folder(), folder)
    monkeypatch.setattr(kernels, "source_folder", lambda: folder)
    return folder


@pytest.fixture
def compile_instance():
    """The compiler, where it is installed."""
    pytest.importorskip("cuda.bindings", reason="the extra ptx is not installed")
    from pagedkv import nvrtc

    return nvrtc.compile_instance


def edit(path, old, new):
    """Replaces a text that must be there; returns its line number."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


def test_includes_are_in_place_once():
    source = kernels.expanded_source("cache_write.cu")
    assert not re.search(r'#include "', source)
    for header in ("types.cuh", "params.cuh", "copy.cuh", "convert.cuh", "paging.cuh", "ptx.cuh"):
        assert source.count(f'#line 1 "cuda/{header}"') == 1


def test_lines_keep_their_numbers():
    """Following the #line directives, every line of every file is where it says."""
    file, number, seen = None, 0, set()
    for line in kernels.expanded_source("cache_write.cu").splitlines():
        directive = re.fullmatch(r'#line (\d+) "cuda/(.+)"', line)
        if directive:
            number, file = int(directive[1]), directive[2]
        elif line.startswith("#line"):
            break  # the generated asserts
        else:
            original = (kernels.source_folder() / file).read_text().splitlines()
            assert original[number - 1] == line
            seen.add(file)
            number += 1
    assert len(seen) == 7


def test_an_edited_header_is_other_source(sources):
    """CuPy's cache keys on the source string, so an edit anywhere must change it."""
    before = sources_of_kernels()
    for header in sorted(sources.glob("*.cuh")):
        users = {file for file, text in before.items() if f'"cuda/{header.name}"' in text}
        assert users
        header.write_text(header.read_text() + "// edited\n")
        after = sources_of_kernels()
        assert {file for file in after if after[file] != before[file]} == users
        before = after


KERNEL_FILES = (
    *("cache_write.cu", "paged_attention.cu", "varlen_decode.cu", "varlen_attention.cu", "merge.cu"),
    "gather.cu",
)


def sources_of_kernels():
    return {file: kernels.expanded_source(file) for file in KERNEL_FILES}


def test_compile_errors_name_file_and_line(sources, compile_instance):
    line = edit(sources / "paging.cuh", "return {block,", "return {blok,")
    with pytest.raises(RuntimeError, match=rf'cuda/paging\.cuh\({line}\): error: identifier "blok" is undefined'):
        compile_instance(WRITE, "sm_90a")
    line = edit(sources / "cache_write.cu", "const int64_t live_slot = pinned(slot);", "const int64_t live_slot = pin;")
    shutil.copy(kernels.Path(kernels.__file__).parent.parent / "cuda" / "paging.cuh", sources / "paging.cuh")
    with pytest.raises(RuntimeError, match=rf'cuda/cache_write\.cu\({line}\): error: identifier "pin" is undefined'):
        compile_instance(WRITE, "sm_90a")


def test_options_of_a_compile(monkeypatch):
    """The same treatment of subnormal numbers as CuPy's compiles get, and a report of registers and spills."""
    pytest.importorskip("cuda.bindings", reason="the extra ptx is not installed")
    from pagedkv import nvrtc

    seen = []
    compile_program = nvrtc._nvrtc().nvrtcCompileProgram

    def spy(program, count, options):
        seen.extend(options)
        return compile_program(program, count, options)

    monkeypatch.setattr(nvrtc._nvrtc(), "nvrtcCompileProgram", spy)
    nvrtc.compile_instance(WRITE, "sm_80")
    assert {b"-std=c++17", b"-ftz=true", b"-arch=sm_80", b"--ptxas-options=-v"} <= set(seen)


FIELDS = {
    "moved": (
        "  int64_t head_stride;\n  int64_t cache_block_stride;",
        "  int64_t cache_block_stride;\n  int64_t head_stride;",
    ),
    "added": ("  int64_t slot_stride;", "  int64_t slot_stride;\n  int64_t another;"),
    "resized": ("  int64_t slot_stride;", "  int32_t slot_stride;"),
    "resized within padding": ("num_packs;\n  uint32_t never;", "num_packs;\n  uint64_t never;"),
}


@pytest.mark.parametrize(("old", "new"), FIELDS.values(), ids=FIELDS.keys())
def test_a_struct_that_differs_from_its_mirror_does_not_compile(sources, compile_instance, old, new):
    text = (sources / "params.cuh").read_text()
    text = re.sub(r"  //.*", "", text)  # the comments behind fields
    assert re.sub(r" +\n", "\n", text).count(old) == 1
    (sources / "params.cuh").write_text(re.sub(r" +\n", "\n", text).replace(old, new))
    with pytest.raises(RuntimeError, match=r"static assertion failed with \"(size|order) of "):
        compile_instance(WRITE, "sm_90a")


def test_fast_divisor():
    """Against Python's own division: small and large divisors, at and around multiples, up to 2^63 - 1."""
    numbers = random.Random(0)
    divisors = [*range(1, 300), 2**20 + 1, 2**31 - 1, *(numbers.randrange(1, 2**31) for _ in range(100))]
    for divisor in divisors:
        multiplier, same, shift = params.fast_divisor(divisor)
        assert same == divisor
        assert multiplier < 2**64
        around = [q * divisor + d for q in (0, 1, 2**31, (2**63 - 2) // divisor) for d in (-1, 0, 1)]
        for x in [*around, 2**63 - 1, *(numbers.randrange(2**63) for _ in range(50))]:
            if 0 <= x < 2**63:
                assert ((x * multiplier >> 64) + x) >> shift == x // divisor


def test_the_list_of_instances():
    assert len(INSTANCES) <= MAX_INSTANCES == 90
    assert len(set(INSTANCES)) == len(INSTANCES)


def test_only_device_arrays_repeat():
    """NumPy calls are always validated: no form of theirs is remembered."""
    call = repeats.Call("reshape_and_cache", (np.zeros(3), None, 1.0), ("auto", "packed"))
    assert call.key is None
    assert call.replay() is repeats.MISS
    call.remember(lambda pointers: None)
    assert call.replay() is repeats.MISS
