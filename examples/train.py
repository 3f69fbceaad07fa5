"""An epoch over a cache, as a trainer sees it: ``python examples/train.py examples/train.yaml``."""

import sys

import latentry

loader, sampler = latentry.from_config(sys.argv[1], batch_size=2)
for step, batch in enumerate(loader):
    latents, text = batch["image_latents"], batch["text_embeddings"]
    print(
        f"step {step}: latents {list(latents.shape)}, text {list(text.shape)}: {batch['metadata']['prompts']}"
    )
print(f"epoch {sampler.epoch}: {loader.state_dict()['batches_yielded']} of {len(loader)} batches received")
