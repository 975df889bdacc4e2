"""How much memory KV takes is decided from what the machine says, and the flag at fault is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bgmpi.errors import UsageError
from bgmpi.memory_plan import DevicePlan, Room, device_pages, host_pages, room_left

GB = 1 << 30
FREE = {"/proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {16 << 20} kB\n"}
UNLIMITED_V1 = {
    "/proc/self/cgroup": "9:name=systemd:/\n4:memory:/\n0::/\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
}


def left(
    files: dict[str, str], environ: dict[str, str] | None = None, ranks: int = 1, shared: int | None = None
) -> Room:
    return room_left({**FREE, **files}.get, environ or {}, ranks, shared)


def test_without_limits_what_is_free_may_be_taken() -> None:
    assert left({}) == Room(16 * GB, "the node's free memory")
    assert left(UNLIMITED_V1) == Room(16 * GB, "the node's free memory")
    assert left({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/memory.max": "max\n"}).bytes == 16 * GB


def test_of_a_cgroups_limit_what_is_used_is_gone_but_for_page_cache() -> None:
    folder = "/sys/fs/cgroup/memory/job"
    files = {
        "/proc/self/cgroup": "5:cpu:/x\n4:hugetlb,memory:/job\n",
        f"{folder}/memory.limit_in_bytes": f"{2 * GB}\n",
        f"{folder}/memory.usage_in_bytes": f"{GB}\n",
        f"{folder}/memory.stat": "cache 1\ninactive_file 9\ntotal_inactive_file 300\ntotal_active_file 50\n",
    }
    assert left(files) == Room(GB + 350, f"memory cgroup {folder}")
    folder = "/sys/fs/cgroup/job"
    files = {
        "/proc/self/cgroup": "0::/job\n",
        f"{folder}/memory.max": f"{2 * GB}\n",
        f"{folder}/memory.current": f"{GB}\n",
        f"{folder}/memory.stat": "file 7\ninactive_file 300\nactive_file 50\n",
    }
    assert left(files) == Room(GB + 350, f"memory cgroup {folder}")


def test_a_limit_further_up_counts_and_a_cgroup_that_cannot_be_seen_does_not_hide_it() -> None:
    files = {
        "/proc/self/cgroup": "0::/job/step/task\n",
        "/sys/fs/cgroup/job/step/memory.max": f"{8 * GB}",
        "/sys/fs/cgroup/job/step/memory.current": "0",
        "/sys/fs/cgroup/job/memory.max": f"{3 * GB}",
        "/sys/fs/cgroup/job/memory.current": f"{GB}",
    }
    assert left(files) == Room(2 * GB, "memory cgroup /sys/fs/cgroup/job")


def test_slurms_limit_counts_when_it_is_the_least_less_what_the_ranks_hold() -> None:
    assert left({}, {"SLURM_MEM_PER_NODE": "3072"}) == Room(3 * GB, "the job's memory in Slurm")
    assert left({}, {"SLURM_MEM_PER_NODE": "0"}).bytes == 16 * GB
    assert left({}, {"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "4"}).bytes == 4 * GB
    assert left({}, {"SLURM_MEM_PER_CPU": "1024"}).bytes == 16 * GB
    held = {"/proc/self/status": "VmRSS: 99 kB\nRssAnon:  1024 kB\nRssFile: 5 kB\nRssShmem: 1024 kB\n"}
    assert left(held, {"SLURM_MEM_PER_NODE": "3072"}, ranks=4).bytes == 3 * GB - (8 << 20)
    assert left(held, {"SLURM_MEM_PER_NODE": "1"}, ranks=4).bytes == 0


def test_the_file_system_of_shared_memory_is_a_limit_too() -> None:
    assert left({}, shared=64 << 20) == Room(64 << 20, "the file system for shared memory")
    with pytest.raises(UsageError, match=r"--host-kv-memory 2,000: the file system for shared memory has 1,000 bytes"):
        host_pages(
            Room(GB, "x"), asked=2000, share=0.9, node_ranks=1, page_bytes=10, most=100, shared=1000
        )


def test_home_is_a_share_of_the_room_over_the_nodes_ranks() -> None:
    room = Room(8_000_000, "x")
    assert host_pages(room, asked=None, share=0.5, node_ranks=4, page_bytes=1000, most=10**9) == 1000
    assert host_pages(room, asked=None, share=0.5, node_ranks=4, page_bytes=1000, rows_bytes=1, most=10**9) == 999
    assert host_pages(room, asked=None, share=0.5, node_ranks=4, page_bytes=1000, most=30) == 30


def test_home_is_taken_as_it_is_said_for_the_whole_node() -> None:
    assert host_pages(Room(1, "x"), asked=20_000, share=0.9, node_ranks=2, page_bytes=1000, most=10**9) == 10


def test_too_small_a_home_is_refused_and_says_whose_limit_it_was() -> None:
    with pytest.raises(UsageError, match=r"from memory cgroup /a \(1,000 bytes left\) over 1 ranks, hold 0 pages"):
        host_pages(Room(1000, "memory cgroup /a"), asked=None, share=1.0, node_ranks=1, page_bytes=2000, most=9)
    with pytest.raises(UsageError, match=r"from --host-kv-memory over 2 ranks, hold 4 pages .* a sequence needs 5"):
        host_pages(Room(1, "x"), asked=8000, share=1.0, node_ranks=2, page_bytes=1000, most=9, required=5)


def split(memory: int, **changes: int) -> DevicePlan:
    """Pages of 4 layers, 400 bytes; two buffers; sequences of up to 10 pages."""
    asked = {"page_bytes": 400, "layers": 4, "buffers": 2, "longest": 10, "useful": 100, "required": 1} | changes
    return device_pages(memory, stream=True, **asked)


def test_a_device_holds_two_layers_of_the_longest_sequence_first_then_the_pool() -> None:
    assert split(2000) == DevicePlan(pages=0, stream_pages=10)
    assert split(4000) == DevicePlan(pages=5, stream_pages=10)


def test_half_of_a_large_device_is_for_streaming_as_far_as_that_is_useful() -> None:
    assert split(16_000) == DevicePlan(pages=20, stream_pages=40)
    assert split(160_000) == DevicePlan(pages=350, stream_pages=100)


def test_a_small_device_streams_what_it_can_hold_unless_more_was_asked_for() -> None:
    assert split(1000) == DevicePlan(pages=0, stream_pages=5)
    with pytest.raises(UsageError, match=r"--device-memory 1,000: the longest sequence has 10 pages and needs 2,000"):
        split(1000, required=10)
    with pytest.raises(UsageError, match=r"raise it, or lower --max-model-len"):
        split(199)


def test_without_streaming_the_longest_sequence_must_fit_twice() -> None:
    asked = {"page_bytes": 400, "layers": 4, "buffers": 2, "longest": 10, "useful": 100}
    assert device_pages(6000, stream=False, **asked) == DevicePlan(pages=10, stream_pages=10)
    assert device_pages(10_000, stream=False, **asked) == DevicePlan(pages=20, stream_pages=10)
    with pytest.raises(UsageError, match=r"needs 6,000 bytes \(2 buffers of one layer, and all its KV"):
        device_pages(5999, stream=False, required=10, **asked)


@given(
    st.integers(1, 10**6), st.integers(1, 80), st.integers(1, 500), st.integers(1, 3), st.integers(1, 300),
    st.integers(1, 10**4), st.booleans(),
)  # fmt: skip
def test_a_plan_is_never_larger_than_the_device_and_always_computes(
    memory: int, layers: int, layer_page: int, buffers: int, longest: int, useful: int, stream: bool
) -> None:
    try:
        plan = device_pages(
            memory, page_bytes=layers * layer_page, layers=layers, buffers=buffers, longest=longest, useful=useful,
            stream=stream,
        )  # fmt: skip
    except UsageError:
        return
    assert plan.pages * layers * layer_page + buffers * plan.stream_pages * layer_page <= memory
    assert plan.stream_pages >= 1
    assert stream or plan.pages >= plan.stream_pages
