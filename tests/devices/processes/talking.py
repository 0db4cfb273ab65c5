"""A child process that sends values until its channel closes."""

from compass_jax.devices.processes import start


def serve(channel, setup, folder):
    while True:
        channel.send(setup)


if __name__ == "__main__":
    start.run(serve)
