"""Memory that automatic sizes leave free, on a simulated machine."""

from __future__ import annotations

from tests.torch.made_up_machine import MIB, Machine, sizing_on, window


def test_a_small_machine_keeps_a_least_amount_free():
    """0.5 % of 20 MiB are 100 KiB, less than the heap's own bookkeeping may take."""
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
