"""What automatic sizes leave free, on the made-up machine."""

from __future__ import annotations

from tests.torch.made_up_machine import MIB, Machine, sizing_on, window


def test_on_a_small_machine_more_than_a_share_is_left_free():
    """Of 20 MiB, 0.5 % are 100 KiB: less than what the heap's own bookkeeping may come to."""
    machine = Machine(limit=20 * MIB, each=MIB // 32, gradients=MIB, state=MIB)
    sizing = sizing_on(machine)
    for _ in range(4):
        window(sizing, machine, 4000)
    assert machine.failures == 0
    report = sizing.report()
    assert report is not None
    room = machine.limit - machine.gradients - machine.state
    assert 2**19 <= room - report.largest * machine.each < 2 * MIB
    assert max(machine.log[-1]) * machine.each <= room - 2**19
