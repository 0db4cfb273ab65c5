"""A session of JetStream's gRPC client with JetStream's server over a tiny model, in a separate
process.

    python jetstream_session.py WEIGHTS PORT < {"prompts": [...], "max_tokens": [...], "serve":
        {...}}          prints {"texts": [...], "health": true, "waiting": 0, "preempted": 0}
"""

import json
import os
import sys
import threading

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import grpc

from compass_jax.commands.options import Serve
from compass_jax.commands.serve import start_jetstream
from compass_jax.rollout.batcher import Batcher


def main() -> None:
    weights, port = sys.argv[1], int(sys.argv[2])
    session = json.load(sys.stdin)
    batchers: list[Batcher] = []
    start = Batcher.__init__

    def watched(self, *args, **options):
        batchers.append(self)
        start(self, *args, **options)

    Batcher.__init__ = watched
    server = start_jetstream(Serve(weights=weights, port=port, jetstream=True, **session["serve"]))
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    stub = jetstream_pb2_grpc.OrchestratorStub(grpc.insecure_channel(f"127.0.0.1:{port}"))
    texts: list[str] = [""] * len(session["prompts"])

    def ask(i: int) -> None:
        content = jetstream_pb2.DecodeRequest.TextContent(text=session["prompts"][i])
        for response in stub.Decode(
            jetstream_pb2.DecodeRequest(text_content=content, max_tokens=session["max_tokens"][i])
        ):
            texts[i] += "".join(response.stream_content.samples[0].text)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    report = {
        "texts": texts,
        "health": stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live,
        "waiting": sum(thread.is_alive() for thread in threads),
        "preempted": sum(batcher.stats.preempted for batcher in batchers),
    }
    print(json.dumps(report), flush=True)
    server.stop()
    os._exit(0)


if __name__ == "__main__":
    main()
