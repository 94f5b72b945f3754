"""A resource server of NeMo Gym: ``python nemo_gym_server.py KIND`` prints its port.

Runs with the Python of an environment that has nemo-gym installed, and imports nothing else. ``counter`` and ``synonyms`` are
the package's own examples; ``faulty`` is a server whose tool and verification fail.
"""

import socket
import sys

import uvicorn
from fastapi import FastAPI, HTTPException
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from resources_servers.example_multi_step.app import ExampleMultiStepResourcesServer
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer


class FaultyServer(SimpleResourcesServer):
    """Its tool ``break`` fails with the status that it gets; a turn ``lost`` is not measured."""

    ray_enabled = False
    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/fail")(self.fail)
        return app

    async def fail(self, body: dict) -> dict:
        if body["status"] == 0:
            import os

            os._exit(1)
        raise HTTPException(body["status"], "no luck")

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        text = body.response.output[-1].content[0].text
        lost = text == "lost"
        return BaseVerifyResponse(
            **body.model_dump(),
            reward=float(text == "right"),
            mask_sample=lost,
            failure_kind="judge_unavailable" if lost else None,
            failure_reason="no judge" if lost else None,
        )


KINDS = {"counter": StatefulCounterResourcesServer, "synonyms": ExampleMultiStepResourcesServer, "faulty": FaultyServer}


def main() -> None:
    kind = sys.argv[1]
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        port = listener.getsockname()[1]
        config_class = KINDS[kind].model_fields["config"].annotation
        config = config_class(host="127.0.0.1", port=port, entrypoint="app.py", name=kind, domain="other")
        head = BaseServerConfig(host="127.0.0.1", port=port)
        client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
        app = KINDS[kind](config=config, server_client=client).setup_webserver()
        print(port, flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
