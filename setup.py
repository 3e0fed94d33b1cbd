"""The package's metadata stands in settings.ini; this file hands it to setuptools."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

parser = ConfigParser(delimiters=["="])
parser.read("settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]

setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"], author=cfg["author"],
    keywords=cfg["keywords"], license="Apache-2.0", url=cfg["git_url"],
    long_description=Path("README.md").read_text(encoding="utf-8"), long_description_content_type="text/markdown",
    packages=find_packages(include=[cfg["lib_name"], cfg["lib_name"] + ".*"]), package_data={cfg["lib_name"]: ["py.typed"]},
    python_requires=">=" + cfg["min_python"], install_requires=cfg["requirements"].split(),
    extras_require={"dev": cfg["dev_requirements"].split()},
    entry_points={"console_scripts": cfg["console_scripts"].split()},
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Developers", "Programming Language :: Python :: 3"],
)
