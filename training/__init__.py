"""How the small text model was made (docs/text_model.md). Needs torch and safetensors; nothing else imports it."""
