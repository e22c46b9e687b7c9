"""Text to tokens and back: tokenizers, chat templates, tools and grammars."""
