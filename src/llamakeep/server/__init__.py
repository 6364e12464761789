"""An OpenAI-compatible server whose prompts stay warm."""
