"""The table of published data sets. Importing this module does not import NumPy."""

import string
from dataclasses import dataclass

from posy.metrics import CLASSES, VALUES

FLAMBY = "flamby"
"""The value of `protocol` that selects the preparation of FLamby's Fed-Heart-Disease."""
CIFAR20 = {
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}
"""The superclasses of CIFAR-100, each with its classes."""
CIFAR100_NAMES = tuple(sorted(" ".join(CIFAR20.values()).split()))
_KVASIR = (
    "dyed-lifted-polyps dyed-resection-margins esophagitis normal-cecum normal-pylorus normal-z-line polyps "
    "ulcerative-colitis"
)
KVASIR = tuple(_KVASIR.split())
DIGITS = tuple(string.digits)


@dataclass(frozen=True)
class Published:
    """A published data set. If ``classes`` is set, Posy prefers ``<name>.npz`` to the original files."""

    about: str
    classes: tuple[str, ...] = ()  # class names in label order
    shape: tuple[int, int, int] | None = None  # (H, W, C) of its images; None: any
    words: int | None = None  # words per text unless `text-length` is set; None: not texts
    torchvision: tuple[str, str] | None = None  # class in torchvision.datasets, and its download folder
    reader: str = "read_torchvision"  # function in posy.data.readers.published
    has_test_set: bool = True  # whether any form of the data set includes a test set
    clients: int = 0  # number of natural groups, which are the clients by default; 0: no natural groups
    categories: str = ""  # categorical columns whose values are numbers
    features: bool = False  # whether its samples are rows of features
    target: str = CLASSES  # a target in posy.metrics
    where: str = ""  # files needed in the data directory; empty: an .npz file or torchvision's folder

    @property
    def kind(self) -> str:
        """The kind of its samples: ``image``, ``text`` or ``features``."""
        if self.features:
            return "features"
        return "image" if self.words is None else "text"


def describe() -> list[tuple[str, str, str, str]]:
    """Return the name, the content and the required files of each data set, and whether Posy downloads it."""
    rows = []
    for name, s in DATASETS.items():
        folder = s.torchvision[1] if s.torchvision else ""
        rows.append((name, s.about, s.where or f"{name}.npz, or {folder}/", "yes" if folder else "no"))
    return rows


DATASETS = {
    "digits": Published(
        "1,797 greyscale 8x8 digits",
        where="nothing: comes with scikit-learn",
        reader="read_digits",
        has_test_set=False,
    ),
    "heart-disease": Published(
        "920 patients at four hospitals, 13 columns with categories and missing values, 2 classes; groups: hospitals",
        reader="read_heart_disease",
        where="nothing: comes with Posy",
        has_test_set=False,
        clients=4,
        categories="cp,restecg,slope,thal",
        features=True,
    ),
    "diabetes": Published(
        "442 patients, 10 features, 1 value: disease progression one year after baseline (Efron et al., 2004)",
        reader="read_diabetes",
        where="nothing: comes with scikit-learn",
        has_test_set=False,
        features=True,
        target=VALUES,
    ),
    "mnist": Published("70,000 greyscale 28x28 digits", DIGITS, (28, 28, 1), torchvision=("MNIST", "MNIST/raw")),
    "fmnist": Published(
        "70,000 greyscale 28x28 images of clothing, 10 classes",
        ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot"),
        (28, 28, 1),
        torchvision=("FashionMNIST", "FashionMNIST/raw"),
    ),
    "cifar10": Published(
        "60,000 RGB 32x32 images, 10 classes",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (32, 32, 3),
        torchvision=("CIFAR10", "cifar-10-batches-py"),
    ),
    "cifar100": Published(
        "60,000 RGB 32x32 images, 100 classes",
        CIFAR100_NAMES,
        (32, 32, 3),
        torchvision=("CIFAR100", "cifar-100-python"),
    ),
    "cifar20": Published(
        "CIFAR-100 with its 20 superclasses",
        tuple(CIFAR20),
        (32, 32, 3),
        torchvision=("CIFAR100", "cifar-100-python"),
        reader="read_cifar20",
        where="cifar20.npz, or the files of cifar100",
    ),
    "emnist-letters": Published(
        "145,600 greyscale 28x28 letters, 26 classes",
        tuple(string.ascii_lowercase),
        (28, 28, 1),
        torchvision=("EMNIST", "EMNIST/raw"),
        reader="read_emnist",
    ),
    "femnist": Published(
        "greyscale 28x28 digits and letters, 62 classes; groups: writers",
        tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
        reader="read_femnist",
        where="LEAF's femnist/train/*.json and femnist/test/*.json, or femnist.npz",
    ),
    "tiny-imagenet": Published(
        "110,000 RGB 64x64 images, 200 classes",
        tuple(map(str, range(200))),
        (64, 64, 3),
        reader="read_tiny_imagenet",
        where="tiny-imagenet-200/train/<wnid>/images/ and val/ with val_annotations.txt, or tiny-imagenet.npz",
    ),
    "agnews": Published(
        "127,600 news texts (the first 100 words of each), 4 classes",
        words=100,
        reader="read_agnews",
        where="agnews/train.csv and agnews/test.csv, or agnews.csv (class 1-4, title, description)",
    ),
    "sent140": Published(
        "tweets (the first 64 words of each), 2 classes; groups: users with 8 or more test samples",
        words=64,
        reader="read_sent140",
        has_test_set=False,
        where="sent140/training.1600000.processed.noemoticon.csv, or sent140.csv",
    ),
    "kvasir": Published(
        "RGB endoscopic images, 8 classes, resized to 64x64 unless `image-size` is set",
        KVASIR,
        reader="read_kvasir",
        where="kvasir/<class>/*.jpg, or kvasir.npz",
    ),
    "fedisic": Published(
        "23,247 RGB skin lesions, 8 classes, resized to 64x64 unless `image-size` is set; groups: 6 centres",
        ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC"),
        reader="read_fedisic",
        where="FLamby's fedisic/train_test_split and fedisic/ISIC_2019_Training_Input_preprocessed/*.jpg, "
        "or fedisic.npz",
    ),
}
