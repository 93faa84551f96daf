"""Draws shapes.png, the picture of image.json: a red square, a blue circle and a green triangle on white.

    python inference/examples/draw_shapes.py
"""

from pathlib import Path

from PIL import Image, ImageDraw


def draw() -> Image.Image:
    """The picture, 126 x 84 pixels RGB: 9 x 6 patches of 14 pixels, so nothing is resized for the bundled checkpoint."""
    image = Image.new("RGB", (126, 84), "white")
    pen = ImageDraw.Draw(image)
    pen.rectangle((8, 24, 40, 60), fill=(220, 40, 40))
    pen.ellipse((47, 24, 79, 60), fill=(40, 80, 220))
    pen.polygon([(101, 22), (85, 60), (118, 60)], fill=(40, 160, 60))
    return image


if __name__ == "__main__":
    draw().save(Path(__file__).with_name("shapes.png"))
