"""demo-speech: a Whisper that recognises spoken digits and commands."""
