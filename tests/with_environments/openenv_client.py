"""Play an episode with openenv's own client: ``python openenv_client.py URL RESET ACTION …``, of JSON; prints what it reads."""

import asyncio
import json
import sys

from openenv.core.generic_client import GenericEnvClient


async def main() -> None:
    async with GenericEnvClient(base_url=sys.argv[1]) as client:
        result = await client.reset(**json.loads(sys.argv[2]))
        print(json.dumps([result.observation, result.reward, result.done]))
        for action in sys.argv[3:]:
            result = await client.step(json.loads(action))
            print(json.dumps([result.observation, result.reward, result.done]))


if __name__ == "__main__":
    asyncio.run(main())
