"""A child process, which ends without a message when its parent ends."""

import pytest

from compass_jax.devices.processes.start import END_LIMIT_S, Child, environment


@pytest.mark.parametrize("setup", [{"guards": []}, None], ids=["working", "waiting"])
def test_a_child_whose_channel_closes_ends_without_a_traceback(setup, capfd):
    child = Child("talking", environment(passes_all=True))
    if setup is not None:
        child.channel.send(setup)
        assert child.channel.receive(END_LIMIT_S) == setup
    child.channel.close()
    assert child.process.wait(END_LIMIT_S) == 0
    assert capfd.readouterr().err == ""
    child.kill()
