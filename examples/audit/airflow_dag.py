"""DAGs for Airflow 3: an audit every ten minutes, and every night a cross-check that must agree with it."""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

COMMAND = "halfway-pipeline audit --config /etc/halfway/halfway.toml"
# One run at a time for a folder, and no retry: an audit that found an anomaly exits with 1.
ONCE = {"start_date": datetime(2026, 1, 1, tzinfo=UTC), "catchup": False, "max_active_runs": 1}

with DAG("halfway_audit", schedule=timedelta(minutes=10), **ONCE) as often:
    BashOperator(task_id="audit", bash_command=f"{COMMAND} --continue --output /audit/continued", retries=0)

with DAG("halfway_audit_whole", schedule="@daily", **ONCE) as nightly:
    cross_check = f"{COMMAND} --cross-check /audit/continued --output"
    BashOperator(task_id="audit", bash_command=cross_check + " /audit/{{ ds }}", retries=0)
