"""Small datasets for tests: generated interactions, and files of the form of MovieLens 100K."""

from __future__ import annotations

from pathlib import Path

from serving.training.dataset import Interactions, generate_interactions


def small_interactions(seed: int = 0, *, num_ratings: int = 3000) -> Interactions:
    """100 users, 120 films."""
    return generate_interactions(num_ratings, num_users=100, num_films=120, seed=seed)


def write_movielens(folder: Path, data: Interactions) -> Path:
    """Writes u.genre, u.item, u.user and u.data; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    films, users = data.films, data.users
    _write(folder / "u.genre", [f"{name}|{number}" for number, name in enumerate(films.genre_names)])
    items = []
    for number, title in enumerate(films.titles):
        genres = films.genre_ids[films.genre_offsets[number] : films.genre_offsets[number + 1]].tolist()
        flags = "|".join("1" if genre in genres else "0" for genre in range(len(films.genre_names)))
        items.append(f"{films.ids[number]}|{title}|01-Jan-1995||http://example.org/|{flags}")
    _write(folder / "u.item", items)
    profiles = zip(
        users.ids.tolist(), users.ages.tolist(), users.genders, users.occupations, users.zip_codes, strict=True
    )
    _write(folder / "u.user", ["|".join(str(field) for field in profile) for profile in profiles])
    ratings = zip(
        users.ids[data.user_index].tolist(),
        films.ids[data.film_index].tolist(),
        data.ratings.astype(int).tolist(),
        data.timestamps.tolist(),
        strict=True,
    )
    _write(folder / "u.data", ["\t".join(str(field) for field in rating) for rating in ratings])
    return folder


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n", encoding="latin-1")
