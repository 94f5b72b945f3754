"""Environment variables with which programs on the SDKs of OpenAI and Anthropic find a session. Imports nothing."""


def session_variables(url: str, key: str, model: str) -> dict[str, str]:
    """Return the variables of a session.

    Args:
        url: address of the gateway.
        key: of the session.
        model: the name of the policy.
    """
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": model,
        "AGENTRL_SESSION_URL": f"{url}/s/{key}/v1",
    }
