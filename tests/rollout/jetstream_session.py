"""Run by test_jetstream.py in a process of its own: JetStream's server over a tiny model, asked by
JetStream's own gRPC client.

    python jetstream_session.py WEIGHTS PORT < {"prompts": [...], "max_tokens": [...]}        prints
        {"texts": [...], "health": true}
"""

import json
import os
import sys
import threading

import grpc

from compass_jax.serve import ServeConfig, start_jetstream


def main() -> None:
    weights, port = sys.argv[1], int(sys.argv[2])
    asked = json.load(sys.stdin)
    server = start_jetstream(
        ServeConfig(
            weights, port=port, slots=2, prompt_tokens=32, max_new_tokens=24, temperature=0.0
        )
    )
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    stub = jetstream_pb2_grpc.OrchestratorStub(grpc.insecure_channel(f"127.0.0.1:{port}"))
    texts: list[str] = [""] * len(asked["prompts"])

    def ask(i: int) -> None:
        content = jetstream_pb2.DecodeRequest.TextContent(text=asked["prompts"][i])
        for response in stub.Decode(
            jetstream_pb2.DecodeRequest(text_content=content, max_tokens=asked["max_tokens"][i])
        ):
            texts[i] += "".join(response.stream_content.samples[0].text)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    health = stub.HealthCheck(jetstream_pb2.HealthCheckRequest()).is_live
    print(
        json.dumps(
            {"texts": texts, "health": health, "waiting": sum(t.is_alive() for t in threads)}
        ),
        flush=True,
    )
    server.stop()
    os._exit(0)


if __name__ == "__main__":
    main()
