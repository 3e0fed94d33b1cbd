"""The package's metadata stands in settings.ini; this file hands it to setuptools."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

parser = ConfigParser(delimiters=["="])
parser.read("settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
lib = cfg["lib_name"]

setup(
    name=lib,
    version=cfg["version"],
    description=cfg["description"],
    author=cfg["author"],
    keywords=cfg["keywords"],
    license="Apache-2.0",
    url=cfg["git_url"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=[lib, lib + ".*"]),
    package_data={lib: ["py.typed", "*.npz"]},
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={"dev": cfg["dev_requirements"].split()},
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": [f"{lib}={lib}._modidx:d"],
    },
    project_urls={
        "Documentation": cfg["doc_host"] + cfg["doc_baseurl"],
        "Source": cfg["git_url"],
        "Changelog": cfg["git_url"] + "/blob/" + cfg["branch"] + "/CHANGELOG.md",
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
        "Typing :: Typed",
    ],
)
