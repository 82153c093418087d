"""Training in PyTorch: corpus, models, runs, comparison, export. Needs the train extra; nothing else imports this."""
