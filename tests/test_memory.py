"""The memory plan: what is kept and how many tokens go through at a time fit together."""

from model.config import QWEN2_5_1_5B
from rl.memory import MemoryPlan, free_bytes, plan_memory

GIB = 1 << 30


def plan(free, wanted=None, cells=12, row_tokens=8 * 1408):
    return plan_memory(wanted, free, QWEN2_5_1_5B, "bfloat16", 32, cells, row_tokens)


def test_many_cells_share_a_micro_batch_of_short_parts():
    assert plan(140 * GIB, row_tokens=4 * 1408) == MemoryPlan("products", 4)


def test_a_cpu_keeps_everything_and_is_limited_by_tokens_alone():
    assert free_bytes() is None
    assert plan(None) == MemoryPlan("none", 4)
    assert plan(None, cells=3, row_tokens=8 * 192).slots == 3 and plan(None, cells=64, row_tokens=8 * 192).slots == 32
    assert plan(None, row_tokens=64 * 4096).slots == 1


def test_less_memory_means_fewer_slots_then_more_work():
    """A slot of 11,264 tokens keeps 23.3 GB by `products` and 1 GB by `all`, and needs 2.9 GiB beside it."""
    assert plan(140 * GIB) == MemoryPlan("products", 2)
    assert plan(60 * GIB) == MemoryPlan("products", 1)
    assert plan(20 * GIB) == MemoryPlan("all", 2)
    assert plan(1 * GIB) == MemoryPlan("all", 1)  # tried, and the device says what is missing


def test_what_is_asked_for_is_done():
    assert plan(20 * GIB, "products") == MemoryPlan("products", 1)
    assert plan(140 * GIB, "all") == MemoryPlan("all", 2)
    assert plan(100 * GIB, "none").slots == 1
