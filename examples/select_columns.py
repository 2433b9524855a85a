"""Choose columns of a CSV file inside a scikit-learn pipeline, and let a grid search find how many.

The step "select" is `SelectKBest` or `KHotSelector`: one line changes, and everything else stays. The CSV file is
written first, from the digits that scikit-learn ships: 64 columns of pixels and a column with the digit. It needs
'.[sklearn]' and pandas, and takes about ten seconds.
"""

import tempfile
from pathlib import Path

import pandas as pd
from sklearn.datasets import load_digits
from sklearn.feature_selection import SelectKBest, VarianceThreshold
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

from khot.sklearn import KHotSelector

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "digits.csv"
    load_digits(as_frame=True).frame.to_csv(path, index=False)

    table = pd.read_csv(path)  # from here on: your own file, and the name of its target column
columns, target = table.drop(columns="target"), table["target"]
train_x, test_x, train_y, test_y = train_test_split(columns, target, test_size=0.3, random_state=0)

counts = [5, 10, 20]
selectors = {
    "SelectKBest": (SelectKBest(), "select__k"),
    "KHotSelector": (KHotSelector(random_state=0), "select__n_features_to_select"),
}
for name, (selector, parameter) in selectors.items():
    pipeline = Pipeline(
        [
            ("constant", VarianceThreshold()),  # some pixels are never used
            ("scale", StandardScaler()),
            ("select", selector),
            ("model", KNeighborsClassifier()),
        ]
    ).set_output(transform="pandas")  # keeps the names of the columns
    search = GridSearchCV(pipeline, {parameter: counts}, cv=3).fit(train_x, train_y)
    scores = ", ".join(f"{k}: {s:.3f}" for k, s in zip(counts, search.cv_results_["mean_test_score"], strict=True))
    print(f"{name}: cross-validated accuracy by k: {scores}")
    print(f"  best k {search.best_params_[parameter]}, accuracy on new rows {search.score(test_x, test_y):.3f}")
    chosen = search.best_estimator_["select"].get_feature_names_out()
    print(f"  columns: {', '.join(chosen[:5])}, …")
