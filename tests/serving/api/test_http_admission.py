from __future__ import annotations

import asyncio

from serving.limits import RequestLimits
from shardrank_testing.serving_api import MODEL, api_request, api_service, run, running_api

HALF = f"POST /v1/models/{MODEL}:rank HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode()


def test_requests_whose_body_never_ends_shut_nobody_out(api_model):
    limits = RequestLimits(max_in_flight=1, max_receiving=4)

    async def main() -> None:
        with api_service(api_model, limits) as service:
            async with running_api(service) as api:
                writers = []

                async def stall() -> None:
                    _, writer = await asyncio.open_connection(api.listening.host, api.listening.http_port)
                    writers.append(writer)
                    writer.write(HALF)
                    while service.in_flight < len(writers):  # noqa: ASYNC110  # the counter tells nobody
                        await asyncio.sleep(0.001)

                for _ in range(3):
                    await stall()
                answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(1))
                assert answer.status_code == 200
                await stall()
                answer = await api.http.post(f"/v1/models/{MODEL}:rank", json=api_request(1))
                assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "overloaded")
                assert "max_receiving = 4" in answer.json()["error"]["message"]
                for writer in writers:
                    writer.close()

    run(main())
