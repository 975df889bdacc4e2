"""How the threads of a kernel share its tasks: draw a number, tell that a task is done, wait until so many are.

Tasks are numbered so that what a task needs has smaller numbers.  Then every number was drawn before any that waits for
it, the thread that drew it is at work on it, and waiting ends with any number of threads, also with one.  A waiting
thread spins, because what it waits for takes microseconds, but offers its core now and then: the one that works may
need it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from bgmpi.kernels.emit import I32, I64, pointer_to

#: Looks at the counter between two offers of the core.
LOOKS = 2048


@intrinsic  # type: ignore[untyped-decorator]
def draw(typing: Any, counter: Any) -> Any:
    """Take the next task number from the counter at this address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer_to(builder, args[0], I64), I64(1), "monotonic")

    return types.int64(types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def arrive(typing: Any, counter: Any) -> Any:
    """Count one task as done; whoever waits for the counter sees all that this thread wrote before."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.atomic_rmw("add", pointer_to(builder, args[0], I64), I64(1), "release")
        return context.get_dummy_value()

    return types.void(types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def wait_for(typing: Any, counter: Any, count: Any) -> Any:
    """Return once `count` tasks have arrived at the counter."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = pointer_to(builder, args[0], I64)
        look, rest, offer, through = (builder.append_basic_block(name) for name in ("look", "rest", "offer", "through"))
        before = builder.block
        builder.branch(look)
        builder.position_at_end(look)
        looks = builder.phi(I64)
        done = builder.icmp_signed(">=", builder.load_atomic(pointer, "acquire", 8), args[1])
        builder.cbranch(done, through, rest)
        builder.position_at_end(rest)
        pause = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, pause, "llvm.x86.sse2.pause"), [])
        more = builder.add(looks, I64(1))
        builder.cbranch(builder.icmp_signed("==", builder.urem(more, I64(LOOKS)), I64(0)), offer, look)
        builder.position_at_end(offer)
        give = ir.FunctionType(I32, [])
        builder.call(cgutils.get_or_insert_function(builder.module, give, "sched_yield"), [])
        builder.branch(look)
        for value, block in ((I64(0), before), (more, rest), (more, offer)):
            looks.add_incoming(value, block)
        builder.position_at_end(through)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code
