"""A test that asks for a database of its own finds it empty, whatever the tests before it left on the server."""

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from tests.support.databases.servers import Server

pytestmark = [pytest.mark.xdist_group("databases"), pytest.mark.timeout(1800)]

TABLE = text("CREATE TABLE left_behind (id varchar(40))")


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "mysql+pymysql"])
def test_it_is_empty_and_goes_although_a_connection_is_open(servers: dict[str, Server], driver: str) -> None:
    """A table of the same name that another test left is not in its way."""
    server = servers[driver.partition("+")[0]]
    shared = create_engine(server.url(driver))
    with shared.begin() as connection:
        connection.execute(TABLE)
    try:
        with server.new_database(driver) as url:
            own = create_engine(url)
            with own.begin() as connection:
                connection.execute(TABLE)
        own.dispose()
        with pytest.raises(OperationalError, match=r"(?i)does not exist|unknown database"):
            own.connect()
    finally:
        with shared.begin() as connection:
            connection.execute(text("DROP TABLE left_behind"))
        shared.dispose()
