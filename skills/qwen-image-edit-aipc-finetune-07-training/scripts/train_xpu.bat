@echo off
rem train_xpu.bat <config.yaml> [--cache, or options of finetune fit]
rem The folder of the config is the workspace. Equal to finetune cache or finetune fit there.
rem Run it in the environment that has aipc-finetune. PYTHON names another interpreter.
setlocal
if not defined PYTHON set "PYTHON=python"
set "PYTHONUTF8=1"
set "SYCL_CACHE_PERSISTENT=1"

rem torch brings its own SYCL runtime: oneAPI is only for kernels that Triton compiles here.
if defined SETVARS_COMPLETED goto run
if not defined ONEAPI_ROOT set "ONEAPI_ROOT=%ProgramFiles(x86)%\Intel\oneAPI"
if not exist "%ONEAPI_ROOT%\setvars.bat" goto run
"%PYTHON%" -P -m runtime.launcher --needs-oneapi %* >nul 2>nul
if not "%ERRORLEVEL%"=="0" goto run

rem With this variable cmd does not look in the current folder, and setvars.bat does not find its vars.bat.
set "KEPT=%NoDefaultCurrentDirectoryInExePath%"
set "NoDefaultCurrentDirectoryInExePath="
call "%ONEAPI_ROOT%\setvars.bat" --force
set "SETVARS_STATUS=%ERRORLEVEL%"
set "NoDefaultCurrentDirectoryInExePath=%KEPT%"
if not "%SETVARS_STATUS%"=="0" echo error: setvars.bat ended with %SETVARS_STATUS% 1>&2
if not "%SETVARS_STATUS%"=="0" exit /b %SETVARS_STATUS%

:run
"%PYTHON%" -P -m runtime.launcher %*
exit /b %ERRORLEVEL%
