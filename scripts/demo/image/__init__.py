"""demo-image: a tiny text-to-image diffusion model of drawn figures, and all that makes and measures it."""
